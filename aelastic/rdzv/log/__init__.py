"""The replicated log of a job: one entry for each round, then the verdict.  Pure functions on frozen records.

This is Raft with three differences.  At most one entry is uncommitted, so a node keeps two: the last one that it knows
to be committed, and the one that it has accepted after it.  Messages carry whole states, so each may be repeated, or
replaced by a later one.  Nothing is on disk: a node that ends takes its vote with it, unless another node saw it end.

Read `entries` (what nodes agree on), `votes` (who decides), `node` (a follower), `leader`, then `cell` (the endpoint)
and `seen` (what an agent has seen of it).  No function looks at a clock or sends anything.  Each takes a state and
returns the next one; time comes in as facts.  Each rule is one function, and its docstring begins with the rule's name.
A test breaks each rule by replacing its function.

A node is a process with a random name.  An agent that replaces it on the same host has another name, and so has an
agent that gives up its log for another.  A name therefore identifies one memory, and the promises in it.
"""

__all__ = ["cell", "entries", "leader", "node", "seen", "votes"]
