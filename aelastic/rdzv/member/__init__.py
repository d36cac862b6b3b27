"""One node's side of the rendezvous, as pure cores.

`member` finds the coordinator, stays with it, and says when this node is to become it; `leader_watch` says whether the
coordinator is gone, `node_state` where the node stands, and what it does about a plan, `search` how long it looks.
`member_events` are its words; `election_news` says what elections are to know of it.
"""

__all__ = ["election_news", "member", "member_events", "search"]
