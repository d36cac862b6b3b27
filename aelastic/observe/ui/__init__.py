"""What people see on a terminal: `status_line` draws the state of a run, `rank_view` lays out the view of all ranks.

`commands` is shared by the commands: how they read options, and how they print. `progress_line` says how far a
command is.
"""

__all__ = ["commands", "progress_line", "status_line"]
