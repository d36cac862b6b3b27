"""Shows the output of workers: from their files to the console.

`run_logs` shows the files of a run, which `attempt_files` makes; its docstring draws a line's path.  A `follower` reads
a file while it grows, and its end; `lines` splits it and `expected_output` searches it.  A `pump` is the thread that
shows files on its sinks; `terminal` keeps live rows below them (`live_lines`).
"""

__all__ = ["expected_output", "run_logs", "terminal"]
