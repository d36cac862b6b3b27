"""Where the only endpoint is gone with the coordinator: what is left of a round goes on, as pure cores.

`election` is one node's part in electing another coordinator, `election_events` are its words; by `electorate` a
coordinator knows whether nodes that it has not heard of could elect another.  `absent` are nodes that it has lost and
that may live, and `leadership` says until when a coordinator may decide.
"""

__all__ = ["absent", "election", "election_events", "electorate", "leadership"]
