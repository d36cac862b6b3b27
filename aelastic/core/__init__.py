"""What cores are made of.

- `record`: immutable values, the words that cores and shells exchange
- `fits`: whether a value from outside is of a type that can be used
- `machine`: one door for events, the story of the last ones, invariants that tests check after each
"""

__all__ = ["fits", "machine", "record"]
