"""The building blocks of cores.

- `record`: immutable values, which cores and shells exchange
- `machine`: one door for events, the story of the last ones, invariants that tests check after each
"""

__all__ = ["machine", "record"]
