"""The messages that agents exchange, and the connections that carry them.

Messages:

- `messages`: the status of a node, its plan, and signs of life; `requests`: requests to a running job
- `codec`: their bytes
- `sense`: which values of their fields make sense
- `ranks`: which node gets which rank
- `addresses`: where workers find the store of group rank 0

Connections:

- `stream` carries messages; `unauthenticated` holds connections that have not identified themselves
- `listening` finds the addresses of an agent, `incoming` holds the connections of one port

A job's secret, which is not kept anywhere itself:

- `secret_file` reads and checks the file, `keys` derives a job's keys from its lines
- `proofs` decides what each end must prove before a message is read; `handshake` proves it, and each frame
- `writing` signs and verifies the endpoint's cell, with `seals`
- `other_secret` decides how long to wait for a leader with a different secret
"""

__all__ = [
    "addresses",
    "codec",
    "handshake",
    "incoming",
    "keys",
    "listening",
    "messages",
    "other_secret",
    "proofs",
    "ranks",
    "requests",
    "seals",
    "secret_file",
    "sense",
    "stream",
    "unauthenticated",
    "waiting",
    "writing",
]
