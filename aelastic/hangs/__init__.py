"""Workers that live but do not progress: file timers, silence, no CPU use.

`watches` are those of a run, each a `watch`: `activity` samples workers and asks the core `hang_rules`, `file_timer` is
torch's timer server around the core `timer_rules`.
"""

__all__ = ["watch", "watches"]
