"""Connections between agents: `stream` carries messages, `strangers` are those of which nothing is known yet.

`proofs` says what each end has to prove before a message is read, `incoming` has those that come in at one port, and
`listening` says where an agent can be reached.
"""

__all__ = ["incoming", "listening", "proofs", "strangers", "stream"]
