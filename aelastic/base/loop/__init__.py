"""What asyncio and anyio lack for an agent.

- `clock`: the time of the loop, and that of the host
- `mailbox`: the only queue of a core's events
- `threads`: calls that block, or may hang with a disk
- `sockets`: waits for descriptors, and accepts connections
- `growth`: waits for files to grow, or to be opened
- `reports`: warnings that cannot flood the log, and unexpected exceptions in one line
- `factory`: event loops by name
"""

__all__ = ["clock", "factory", "growth", "mailbox", "reports", "sockets", "threads"]
