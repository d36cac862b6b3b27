"""The manual of commands: one table, from which their parsers, `--help`, and `docs/reference/cli.md` are made.

`rows` defines a row, `table` has all rows, and `readers` read the values of options.  `parsing` makes a parser from a
row, and `text` its help.
"""

__all__ = ["parsing", "rows", "table", "text"]
