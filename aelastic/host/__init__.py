"""What the kernel tells of this machine.

- `proc_table`: the process table, the one place that reads it; `usage`: CPU time and memory of a process
- `helpers`: starts helper processes; `signals`: what they ignore
- `reaping`: waiting for child processes, and reaping them
- `inotify`: when files grow
"""

__all__ = ["helpers", "inotify", "proc_table", "reaping", "signals", "usage"]
