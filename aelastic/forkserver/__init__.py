"""Warm starts: a fork server imports what the workers need, and forks them on request.

- `fork_server`: the agent's side: starts the process, keeps forked processes ready, makes workers of them
- `learning`: what the first workers import
- `parked`: one forked process, until it is a worker; `children`: the worker, as `procs` follows it
- `preload`: what becomes of a fork server that imports, trips over a module, or dies (a core)
- `command`: whether a worker's command can be run by a forked interpreter (a core)
- `program`, `worker`, `checks`, `clone`, `priority`: the process itself; they run without the package

Why a fork is safe, and what differs from a cold start: `docs/how-to/preload.md`, ADR 17.
"""

__all__ = ["children", "command", "fork_server"]
