"""This machine, as the kernel shows it.

- `proc_table`: the process table, the one place that reads it
- `process_states`: which processes live and do not run on; `kernel_states`: what that is called
- `usage`: CPU time and memory of processes, what the kernel refuses and why, and whether it killed for want of memory
- `session_activity`: what sessions write and compute
- `children`: starts helper processes, waits for child processes, and reaps them; `signals`: what helpers ignore
- `programs`: runs programs of other people; `daemon_threads`: calls that may never return
- `names`: addresses of host names, looked up where nothing waits for a name server
- `resending`: how soon the kernel repeats what a network has lost
- `sockets`: those that listen, which processes are connected to a port, and doors by which its user speaks to agents
- `files`: writes them whole; `patterns`: searches what workers write for what users give
"""

__all__ = [
    "children", "daemon_threads", "files", "kernel_states", "names", "patterns", "proc_table", "process_states",
    "programs", "resending", "session_activity", "signals", "sockets", "usage",
]  # fmt: skip
