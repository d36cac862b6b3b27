"""What people see on a terminal: `status_line` draws the state of a run, `rank_view` lays out the view of all ranks.

`commands` is what programs beside the launcher share, as `aelastic spent`: how they read options, and how they speak.
"""

__all__ = ["commands", "status_line"]
