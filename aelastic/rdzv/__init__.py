"""Rendezvous: the agents of a job agree on the next round, and on the agent that leads.

`docs/explanation/rendezvous.md` tells how.  The link of an agent is `agent_link` to the leader,
`single_node` in a job of one node, or `torch_handler_link`; `registry` has the back ends by name.  The cores decide,
and do nothing else:

- `log/`: the rules by which agents agree
- `leader/`: rounds, restarts and the verdict; `leader_server` puts it on the wire
- `member/`: each node's side; `agent_link` puts it on the wire, `campaigns` asks other nodes for their votes

Both speak through

- `protocol/`: messages, their bytes, the connections that carry them, and what a secret proves
- `stores/`: the endpoint's cell, in a TCPStore, in several, or in etcd

`restart_policy` says what follows from the end of a round, by the rules of `--restart-policy` (`restart_rules`) and
what is remembered from one end to the next (`ledger`); `decisions/` has what was decided as values, and their wording.
"""

__all__ = [
    "agent_link", "ledger", "lent_handler", "registry", "restart_policy", "restart_rules", "settings", "single_node",
    "torch_handler_link",
]  # fmt: skip
