"""torch's TCPStore in a child of the agent: the workers' store, and the boards' way to a store.

`host` serves the store of each round, `child` is the child process as the agent sees it, `server` the program that it
runs.
"""

__all__ = ["child", "host"]
