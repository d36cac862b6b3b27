"""Connections between agents: `stream` carries messages, `strangers` are those of which nothing is known yet.

`proofs` says what each end has to prove before a message is read, and `listening` where an agent can be reached.
"""

__all__ = ["listening", "proofs", "strangers", "stream"]
