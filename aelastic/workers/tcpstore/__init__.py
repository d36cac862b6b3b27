"""torch's TCPStore in a child of the agent: the workers' store, and the rendezvous's way to a store.

`host` serves the store of each round, `child` is the child process as the agent sees it, `template` the
process that several are forked from, `server` the program that they run, and `lines` its connections to one store.
"""

__all__ = ["child", "host", "template"]
