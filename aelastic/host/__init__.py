"""This machine, as the kernel shows it.

- `proc_table`: the process table, the one place that reads it; `usage`: CPU time and memory of a process
- `helpers`: starts helper processes; `signals`: what they ignore
- `reaping`: waiting for child processes, and reaping them
<<<<<<< HEAD
- `listeners`: sockets that listen, for every host or for this one
- `inotify`: when files grow
"""

__all__ = ["helpers", "inotify", "listeners", "proc_table", "reaping", "signals", "usage"]
=======
- `inotify`: when files grow; `limits`: what the kernel refuses, and why
"""

__all__ = ["helpers", "inotify", "limits", "proc_table", "reaping", "signals", "usage"]
>>>>>>> c3e9c0a (What workers use up, the agent can do without: threads, processes, descriptors)
