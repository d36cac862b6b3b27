"""This machine, as the kernel shows it.

- `proc_table`: the process table, the one place that reads it
- `usage`: CPU time and memory of processes, what the kernel refuses and why, and whether it killed for want of memory
- `session_activity`: what sessions write and compute
- `helpers`: starts helper processes; `signals`: what they ignore; `programs`: runs programs of other people
- `reaping`: waiting for child processes, and reaping them
- `sockets`: those that listen, which processes are connected to a port, and doors by which its user speaks to agents
- `files`: writes them whole; `inotify`: when they grow
"""

__all__ = [
    "files", "helpers", "inotify", "patterns", "proc_table", "programs", "reaping", "session_activity",
    "signals", "sockets", "usage",
]  # fmt: skip
