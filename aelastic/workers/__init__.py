"""Processes of this machine: how they are started, bound to CPUs and cleaned up after.

- `caches`: where workers keep what they compile
- `children`: a worker as a child of this process: a command, or a function
- `functions`: what runs in the child process of a function
- `mp_fork_server`: what the fork server of `multiprocessing` preloads
- `guard`: the process that kills an agent's workers when the agent dies; `guard_process`: as the agent sees it
- `requirements`: what a job requires of this machine: its program, torch, open files
- `numa`: which CPUs a worker may run on (a core); `topology` reads what the machine looks like, `affinity` binds
"""

__all__ = ["affinity", "caches", "children", "functions", "guard", "guard_process", "requirements", "topology"]
