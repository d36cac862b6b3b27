"""The rules by which workers that are alive but make no progress are found; `aelastic.agent.watches` looks at workers.

- `options`: what a user can set
- `hang_rules`: no output, no CPU time and no IO, or no expected output, for too long
- `timer_rules`: timers that workers set and did not clear in time
"""

__all__ = ["hang_rules", "options", "timer_rules"]
