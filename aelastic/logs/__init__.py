"""Output of workers: from their files to the console.

`run_logs` shows the files of a run, which `attempt_files` makes; the picture there says how a line travels.  A
`follower` reads a file while it grows, and its end, `lines` and `expected_output` split and search it, a `pump` is the
thread that shows files on its sinks; `terminal` keeps live rows below them (`live_lines`).
"""

__all__ = ["expected_output", "run_logs", "terminal"]
