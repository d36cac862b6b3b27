"""Finds workers that are alive but make no progress.

There are two watches (`watch` is their interface), each a shell around pure rules: `file_timer` (`timer_rules`) for
timers that workers set, `activity` (`hang_rules`) for output, CPU use and IO.  `agent.watches` makes the enabled ones.
"""

__all__ = ["activity", "file_timer", "watch"]
