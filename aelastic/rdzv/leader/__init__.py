"""One agent decides for the job: which nodes take part, when a round begins, when the job is over.  Pure.

`leader` is one agent's candidacy and leadership.  It composes

- `connections`, and the nodes behind them; `pending_reports`: reports that wait for a decision; `plans`: the whole plan
  of each node; `absent`: nodes that were lost but may live
- `rdzv.log`: how the agents agree on the next entry; `job_state`: its content; `followers`: the nodes that vote;
  `leader_cell`: the endpoint's cell, and the open question to it
- `coordinator`: rounds, restarts and the verdict, with `roster` (nodes), `first_cause` (why a round has ended),
  `forming` (what that costs, and when the next one begins), `gathering` (the nodes of a round that is older than this
  leader) and `hang_comparison` (what all workers do when one hangs); `cordons` (the ledger, and the nodes that it
  cordons); `rdzv.restart_policy` decides what follows when a round ends
- `drain`: requests to a running job, above all that all ranks save at one step before nodes leave
- `waiting_text`: the lines that waiting nodes log

`leader_events` and `coordinator_events` are the events and actions of the two cores.
"""

__all__ = [
    "absent",
    "connections",
    "coordinator",
    "coordinator_events",
    "cordons",
    "drain",
    "followers",
    "forming",
    "gathering",
    "hang_comparison",
    "job_state",
    "leader",
    "leader_cell",
    "leader_events",
    "plans",
    "roster",
]
