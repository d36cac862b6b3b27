"""What agents tell each other.

- `messages`: facts and decisions, greetings and signs of life
- `codec`: their bytes
- `ranks`: which node gets which rank
- `addresses`: where workers find the store of group rank 0
"""

__all__ = ["addresses", "codec", "messages", "ranks"]
