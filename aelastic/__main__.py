"""`python -m aelastic`."""

# A spawned child of `multiprocessing` imports this file under another name, and needs none of the command line.
if __name__ == "__main__":
    from aelastic.cli.main import main_and_exit

    main_and_exit()
