"""What this agent does next with its workers: a core, its events and actions, and the interface to the back end.

- `worker_group`: the core; `events`: its events and actions; `phases`: what it is doing, and how its workers end
- `in_place`: a part of `worker_group`: the stage of each worker that recovers in place
- `restart_grace`: a core: how long to wait for workers that are being stopped for a restart
- `worker_env`: the environment that a worker starts with
- `backend`: the interface that starts, waits for and stops workers
"""

__all__ = ["backend", "events", "in_place", "phases", "restart_grace", "worker_env", "worker_group"]
