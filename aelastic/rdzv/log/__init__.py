"""The replicated log that a job is: one entry for each round, the verdict last.  Pure functions on frozen records.

It is Raft with three differences.  At most one entry is uncommitted, so a node keeps two: the last one that it knows to
be committed, and the one that it accepted after it.  Messages carry whole states, so each may be repeated, or replaced
by a later one.  And nothing is on disk: a node that ends takes its vote along, unless another one saw it end.

Read `entries` (what is agreed on), `votes` (who decides), `node` (a follower), `leader`, then `cell` (the endpoint).
No function looks at a clock or sends anything.  Each takes a state and returns the next one; time comes in as facts.
Each rule is one function, and the first words of its docstring name the rule: a test breaks it by replacing it.

A node is a process with a random name: the agent that replaces it on the same host has another one, and so has an
agent that gives up its log for another.  So a name stands for one memory, and for the promises in it.
"""

__all__ = ["cell", "entries", "leader", "node", "votes"]
