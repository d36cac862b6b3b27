"""The manual of commands: one table, from which their parsers, `--help`, and `docs/reference/cli.md` are made.

`rows` says what a row is, `table` has them, and `readers` read the values of options.  `parsing` makes a parser of a
row, and `text` makes its help.
"""

__all__ = ["parsing", "rows", "table", "text"]
