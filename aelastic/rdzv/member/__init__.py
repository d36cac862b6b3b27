"""One node's side of the rendezvous, as pure cores.

`member` finds the leader, follows it, and decides when this node campaigns.  `node_state` holds the state of this node,
`sight` what it sees of the endpoint's cell, `search` how long it looks, `trust` which leader it follows.
`member_events` are the events and actions.  `agreed` is what a node knows of the log, for `status` and its own log.
"""

__all__ = ["agreed", "member", "member_events", "search"]
