"""What agents tell each other.

- `messages`: the status of a node, its plan, and signs of life
- `codec`: their bytes
- `sense`: which values of their fields make sense
- `ranks`: which node gets which rank
- `addresses`: where workers find the store of group rank 0
"""

__all__ = ["addresses", "codec", "messages", "ranks", "requests", "sense"]
