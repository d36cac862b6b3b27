"""What this agent does next with its workers: a core, its words, and the interface to what runs them.

- `worker_group`: the core; `events`: what it hears and asks for; `phases`: what it is doing, and how its workers end
- `in_place`: a part of `worker_group`: where each worker stands that recovers in place
- `restart_grace`: a core: how long workers that are stopped for a restart are waited for
- `worker_env`: the environment that a worker starts with
- `backend`: the interface of what starts, waits for and stops workers
"""

__all__ = ["backend", "events", "in_place", "phases", "restart_grace", "worker_env", "worker_group"]
