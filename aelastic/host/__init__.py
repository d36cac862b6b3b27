"""This machine, as the kernel shows it.

- `proc_table`: the process table, the one place that reads it; `usage`: CPU time and memory of a process
- `session_activity`: what sessions write and compute
- `helpers`: starts helper processes; `signals`: what they ignore; `programs`: runs programs of other people
- `reaping`: waiting for child processes, and reaping them
- `listeners`: sockets that listen, for every host or for this one; `connections`: which processes have one to a port
- `doors`: sockets by which this user speaks to its agents
- `files`: writes them whole; `inotify`: when they grow; `limits`: what the kernel refuses, and why
"""

__all__ = [
    "connections", "doors", "files", "helpers", "inotify", "limits", "listeners", "patterns", "proc_table",
    "programs", "reaping", "session_activity", "signals", "usage",
]  # fmt: skip
