"""Rendezvous: the agents of a job agree on the next round, and on the agent that decides.

`registry` opens the link of a job: the in-process one, an `agent_link` over a `board`, or torch's handler.
The cores are in `member/` (each node's side) and `coordinator/` (the one that decides, which `coordinator_server`
puts on the wire; of one node: `single_node`).  `restart_policy` says what follows from the end of a round, by the rules
of `--restart-policy` (`restart_rules`) and what is remembered from one end to the next (`ledger`).  `protocol/` has
their messages, `wire/` the connections that carry them, `secret/` what these prove, `stores/` what keeps the board's
text (`record_text`, `writing`).
"""

__all__ = [
    "board",
    "leader_record",
    "ledger",
    "record_text",
    "registry",
    "restart_policy",
    "restart_rules",
    "settings",
    "writing",
]
