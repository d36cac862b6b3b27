"""This machine, as the kernel shows it.

- `proc_table`: the process table, the only place that reads it
- `process_states`: which live processes do not run; `kernel_states`: the names of these states
- `usage`: CPU time and memory of processes; `shortages`: what the kernel refuses and why; `oom`: out-of-memory kills
- `session_activity`: how much sessions write and compute
- `children`: starts helper processes, waits for child processes, and reaps them; `signals`: what helpers ignore
- `programs`: runs third-party programs; `daemon_threads`: calls that may never return
- `names`: addresses of host names, looked up without blocking on a name server
- `resending`: how soon the kernel retransmits lost packets
- `ports`: listening sockets; `connections`: which processes are connected to a port
- `control_sockets`: by which users reach agents
- `files`: writes files atomically; `patterns`: searches workers' output for users' patterns
"""

__all__ = [
    "children", "connections", "control_sockets", "daemon_threads", "files", "kernel_states", "names", "oom",
    "patterns", "ports", "proc_table", "process_states", "programs", "resending", "session_activity", "shortages",
    "signals", "usage",
]  # fmt: skip
