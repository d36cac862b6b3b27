"""The command line: arguments and environment in, exit code out.

`main` runs it and owns the process.  `parser` reads the arguments by the table of `options`, whose values `converters`
read; `arguments` makes a checked `Invocation` of them, with `rendezvous_options` (of several nodes: `several_nodes`)
and `output_options`; `advice` finds options without effect.  `verbs` are
for a job that runs.  `completion` prints scripts for shells.  `stderr` writes log lines and reports.
"""

__all__ = [
    "advice", "arguments", "completion", "converters", "main", "options", "output_options", "parser",
    "rendezvous_options", "several_nodes", "stderr", "verbs",
]  # fmt: skip
