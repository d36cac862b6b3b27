"""The command line: arguments and environment in, exit code out.

`main` runs the command and owns the process.  `parser` reads the arguments by the table of `options`, most of which are
made of fields (`base.setting`); `arguments` makes a checked `Invocation` of them, including the `spec_fields` that
several options decide (for several nodes: `several_nodes`).  `process` handles stderr and signals of this process.

`commands` runs a command instead of a job: `doctor`, one of the `verbs`, `timeline`, `spent`, or one of `tools`.
`rehearsal` reads the command line of `rehearse`, and `own_options` makes the options of such a command.  `help` makes
the text of `--help` from what `manual` knows of each command, and `shells` has what completes a command line.
"""

__all__ = [
    "arguments", "main", "options", "parser", "process", "several_nodes", "shells", "spec_fields",
    "timeline", "verbs",
]  # fmt: skip
