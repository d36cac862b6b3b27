"""One node's side of the rendezvous, as pure cores.

`member` finds the leader, follows it, and says when this node campaigns; `node_state` is where the node stands, `sight`
what it sees of the endpoint's cell, `search` how long it looks.  `member_events` are its words.
"""

__all__ = ["member", "member_events", "search"]
