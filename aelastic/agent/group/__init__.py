"""What this agent does next with its workers: a core, and its events and actions.

- `worker_group`: the core; `events`: its events and actions; `phases`: how its workers end, and what follows
- `in_place`: a part of `worker_group`: the stage of each worker that recovers in place
- `restart_grace`: a core: how long to wait for workers that are being stopped for a restart
- `worker_env`: the environment that a worker starts with
"""

__all__ = ["events", "in_place", "phases", "restart_grace", "worker_env", "worker_group"]
