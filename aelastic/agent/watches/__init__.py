"""Watches over the workers of a run: how far their start has come, their progress since, and whether they hang.

- `watch`: the interface of a watch that finds workers that hang: `activity` looks at output, CPU use and IO, and
 `file_timer` at timers that workers set; their rules are in `aelastic.diagnose.hangs`
- `watches`: the watches of a run
"""

__all__ = ["watch", "watches"]
