"""Watches over the workers of a run.  None of them decides anything, and each runs until the run ends.

- `start`: how far a start has come
- `progress`: steps, their pace and the time left
- `hang_watches`: the watches of a run that find workers that hang.  `watch` is their interface; `activity` looks at
 output, CPU use and IO, and `file_timer` at timers that workers set.  Their rules are in `aelastic.diagnose.hangs`
"""

__all__ = ["hang_watches", "progress", "start", "watch"]
