"""What `aelastic help` knows: of each command, and of each message that needs more than its line.

One table has all commands: their parsers, `--help` and `docs/reference/cli.md` are made from it.  `rows` defines a row,
`table` has all rows, and `readers` read the values of options.  `parsing` makes a parser from a row, and `text` its
help.  `topics` has the entries of the troubleshooting page.
"""

__all__ = ["parsing", "rows", "table", "text", "topics"]
