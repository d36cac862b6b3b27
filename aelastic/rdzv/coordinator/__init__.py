"""One agent decides for the job: which nodes take part, when a round begins, when the job is over.  Pure.

`leader` is one agent's candidacy, and its leadership.  It composes

- `connections`, and the nodes behind them; `unheard`: reports that are not decided yet; `plans`: the whole plan of each
  node; `absent`: nodes that were lost and may live
- `rdzv.log`: how the agents agree on the next entry; `job_state`: what an entry holds; `followers`: those that vote;
  `leader_cell`: the endpoint's cell, and the question to it that is open
- `coordinator`: rounds, restarts and the verdict, with `roster` (nodes), `first_cause` (why a round has ended),
  `forming` (what that costs, and when the next begins), `gathering` (the nodes of a round that is older than this
  leader) and `inquiry` (what all workers do, when one hangs); `cordons` (what is remembered, and nodes that are
  cordoned by it); `rdzv.restart_policy` says what follows from an end
- `waiting_text`: what nodes that wait read

`session_events` and `coordinator_events` are what the two cores are told and ask for.
"""

__all__ = [
    "absent",
    "connections",
    "coordinator",
    "coordinator_events",
    "cordons",
    "followers",
    "forming",
    "gathering",
    "inquiry",
    "job_state",
    "leader",
    "leader_cell",
    "plans",
    "roster",
    "session_events",
]
