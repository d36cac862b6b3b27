"""Tools of the event loop.

`mailbox` is the one queue of a core's events, `accept` takes connections and drops none half made, `loops` names the
loops, `threads` has those that may hang with a disk, `clock` tells the time.
"""

__all__ = ["accept", "clock", "loops", "mailbox", "threads"]
