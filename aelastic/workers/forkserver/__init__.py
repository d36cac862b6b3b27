"""Warm starts: a fork server imports the modules that workers need, and forks workers on request.

- `fork_server`: the agent's side: starts the process, keeps forked processes ready, turns them into workers
- `learning`: learns which modules the first workers import
- `parked`: one forked process, until it is a worker; `children`: the worker, as `procs` follows it
- `preload`: the life of a fork server: imports, modules that must not be preloaded, deaths (a core)
- `command`: whether a forked interpreter can run a worker's command (a core)
- `program`, `worker`, `checks`, `clone`, `priority`: the process itself; they run without the package

Why a fork is safe, and what differs from a cold start: `docs/how-to/preload.md`, ADR 17.
"""

__all__ = ["children", "command", "fork_server", "parked"]
