"""Any `RendezvousHandler` of torch as a link of this agent.

`handler_link` runs the rounds that the handler makes, `handler_thread` calls its blocking methods in a thread.  `lent`
holds a handler that the caller has made, until the run ends.
"""

__all__ = ["handler_link", "lent"]
