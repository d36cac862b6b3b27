"""Any `RendezvousHandler` of torch as a link of this agent.

`handler_link` runs the rounds that the handler makes, `handler_thread` calls its blocking methods in a thread.
"""

__all__ = ["handler_link"]
