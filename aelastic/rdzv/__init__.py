"""Rendezvous: the agents of a job agree on the next round, and on the agent that leads.

`registry` opens the link of a job: the in-process one, an `agent_link` over a store, or torch's handler.
`log/` has the rules by which agents agree; `docs/explanation/rendezvous.md` tells them.  The cores are in `member/`
(each node's side) and `coordinator/` (the leader's, which `coordinator_server` puts on the wire; of one node:
`single_node`).  `endpoint_cell` is the text at the endpoint, as one agent reads and writes it; `stores/` keep it,
`writing` proves it, and `seen` is what an agent saw there last.  `campaigns` asks other nodes for their votes.
`restart_policy` says what follows from the end of a round, by the rules of `--restart-policy` (`restart_rules`) and
what is remembered from one end to the next (`ledger`).  `protocol/` has the messages, `wire/` the connections that
carry them, `secret/` what these prove.
"""

__all__ = [
    "endpoint_cell",
    "ledger",
    "registry",
    "restart_policy",
    "restart_rules",
    "settings",
    "writing",
]
