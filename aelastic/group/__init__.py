"""The worker group of this agent: what it does next.

`worker_group` is the core, with `phases`; `events` are its words, `worker_env` the environment of a worker, `backend`
the interface of what starts the workers.
"""

__all__ = ["backend", "events", "phases", "worker_env", "worker_group"]
