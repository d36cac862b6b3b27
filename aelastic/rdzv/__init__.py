"""Rendezvous: the agents of a job agree on the next round, and on the agent that leads.

`docs/explanation/rendezvous.md` tells how.  `registry` opens the link of a job: `agent_link` to the leader,
`single_node` in a job of one node, or `torch_handler_link`.  The cores decide, and do nothing else:

- `log/`: the rules by which agents agree
- `leader/`: rounds, restarts and the verdict; `leader_server` puts it on the wire
- `member/`: each node's side; `agent_link` puts it on the wire, `campaigns` asks other nodes for their votes

Both speak through

- `protocol/`: messages, their bytes, the connections that carry them, and what a secret proves
- `stores/`: the endpoint's cell, in a TCPStore, in several, or in etcd

`restart_policy` says what follows from the end of a round, by the rules of `--restart-policy` (`restart_rules`) and
what is remembered from one end to the next (`ledger`).
"""

__all__ = [
    "ledger",
    "lent_handler",
    "registry",
    "restart_policy",
    "restart_rules",
    "settings",
    "single_node",
    "torch_handler_link",
]
