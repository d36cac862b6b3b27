"""`python -m aelastic`."""

# A spawned child of `multiprocessing` imports this file under another name, and needs none of the command line.
if __name__ == "__main__":
    import signal

    # A Ctrl-C while the rest is imported ends this process as it ends any other, without a traceback.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    from aelastic.cli.main import main_and_exit

    main_and_exit()
