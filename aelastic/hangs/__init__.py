"""Workers that live but do not progress.

`watches` makes the watches that are on (`watch` is their interface) and reports what they find.  There are two, each a
shell around pure rules: `file_timer` (`timer_rules`) for timers that workers set, `activity` (`hang_rules`) for output,
CPU use and IO.
"""

__all__ = ["watch", "watches"]
