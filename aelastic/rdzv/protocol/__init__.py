"""What agents tell each other, and how it gets there.

Messages:

- `messages`: the status of a node, its plan, and signs of life; `requests`: what somebody asks of a running job
- `codec`: their bytes
- `sense`: which values of their fields make sense
- `ranks`: which node gets which rank
- `addresses`: where workers find the store of group rank 0

Connections:

- `stream` carries messages; `strangers` are connections of which nothing is known yet
- `listening` says where an agent can be reached, `incoming` has the connections of one port

A job's secret, which is itself kept nowhere:

- `secret_file` reads and judges the file, `keys` makes a job's keys of its lines
- `proofs` says what each end has to prove before a message is read; `handshake` proves it, and each frame
- `writing` proves what is written in the endpoint's cell, with `seals`
- `other_secret` says how long to wait for a leader whose secret is another one
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
    "strangers",
    "stream",
    "waiting",
    "writing",
]
