"""The command line: arguments and environment in, exit code out.

`main` runs it and owns the process.  `parser` reads the arguments by the table of `options`, whose values `converters`
read; `arguments` makes a checked `Invocation` of them, with the `spec_fields` that several options decide (of several
nodes: `several_nodes`).  `process` has what is of this process: stderr and signals.  `commands` runs a command that
starts no job: one of the `verbs`, for a job that runs or is over, `doctor`, or `help`.  `rehearsal` reads the command
line of `rehearse`.  `completion` prints scripts for shells.
"""

__all__ = [
    "arguments", "completion", "converters", "main", "options", "parser", "process", "several_nodes", "spec_fields",
    "verbs",
]  # fmt: skip
