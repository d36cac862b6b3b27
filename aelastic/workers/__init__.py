"""Worker processes of this machine: starting them, binding them to CPUs and cleaning up after them.

- `backend`: the interface that starts, waits for and stops workers; `states`: the states of workers and their group
- `forkserver`: starts workers warm; `tcpstore`: the workers' store, in a child process
- `caches`: the folder for code that workers compile
- `children`: a worker as a child of this process: a command, or a function
- `functions`: runs a function in its child process
- `mp_fork_server`: a module that the fork server of `multiprocessing` preloads
- `guard`: the process that kills an agent's workers when the agent dies; `guard_process`: the agent's side of it
- `requirements`: what a job requires of this machine: its program, and torch
- `options`: what a user can set
- `numa`: which CPUs a worker may run on (a core); `topology` reads the machine's layout, `affinity` binds
"""

__all__ = [
    "affinity", "backend", "caches", "children", "functions", "guard", "guard_process", "numa", "options",
    "requirements", "states", "topology",
]  # fmt: skip
