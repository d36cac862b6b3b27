"""The command line: arguments and environment in, exit code out."""
