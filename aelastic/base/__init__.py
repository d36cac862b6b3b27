"""The foundation of everything else; it knows nothing of jobs.

- `record`: immutable values, which cores and shells exchange
- `machine`: the base of a core: one entrance for events, a trace of the last ones, invariants that tests check
- `errors`: the base of all errors
- `renamed`: fields of JSON that users read, and their old names
- `setting`: a field that is a setting of the user, with its rule, its words and its option
- `texts`: readers of what a user types
- `loop`: what asyncio and anyio lack for an agent
- `host`: this machine, as the kernel shows it
"""

__all__ = ["errors", "machine", "record", "renamed", "setting", "texts"]
