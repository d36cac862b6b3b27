"""The command line: arguments and environment in, exit code out.

`main` runs it and owns the process.  `parser` reads the arguments by the table of `options`, whose values `converters`
read; `arguments` makes a checked `Invocation` of them, with the `spec_fields` that several options decide (of several
nodes: `several_nodes`).  `process` has what is of this process: stderr and signals.  `commands` are
what is no job: `verbs`, for one that runs or is over, and `doctor`.  `completion` prints scripts for shells.
"""

__all__ = [
    "arguments", "completion", "converters", "main", "options", "parser", "process", "several_nodes", "spec_fields",
    "verbs",
]  # fmt: skip
