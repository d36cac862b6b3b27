"""What cores are made of.

- `record`: immutable values, the words that cores and shells exchange
- `machine`: one door for events, the story of the last ones, invariants that tests check after each
"""

__all__ = ["machine", "record"]
