"""Rendezvous: the agents of a job agree on the next round, and on the agent that decides.

`registry` opens the link of a job: the in-process one, an `agent_link` over a `board`, or torch's handler.
The cores are in `member/` (each node's side) and `coordinator/` (the one that decides, which `coordinator_server`
puts on the wire; of one node: `single_node`).  `restart_policy` says what follows from the end of a round, by the rules
of `--restart-policy` (`restart_rules`) and what is remembered from one end to the next (`ledger`).  `protocol/` has
their messages, `wire/` the connections that carry them, `secret/` what these prove, `boards/` the stores that hold the
leader record.
"""

__all__ = ["board", "ledger", "registry", "restart_policy", "restart_rules", "settings"]
