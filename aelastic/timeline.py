"""`python -m aelastic.timeline`, which `aelastic timeline` does as well."""

if __name__ == "__main__":
    import sys

    from aelastic.cli.timeline import main

    sys.exit(main())
