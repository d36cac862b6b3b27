"""One agent decides for the job: which nodes take part, when a round begins, when the job is over.  Pure.

`leader` is one agent's term as coordinator, with `survivors.leadership` (until when it may decide).  It composes

- `connections`, and the nodes behind them; `unheard`: reports that are not decided yet; `plans`: the whole plan of each
  node
- `coordinator`: rounds, restarts and the verdict, with `roster` (nodes), `first_cause` (why a round has ended),
  `forming` (what that costs, and when the next begins), `takeover` (nodes that bring a past along) and
  `inquiry` (what all workers do, when one hangs); `bench` (what is remembered, and nodes that have no seat by it);
  `rdzv.restart_policy` says what follows from an end
- `verdict`: holds it until the board has it
- `waiting_text`: what nodes that wait read

`session_events` and `coordinator_events` are what the two cores are told and ask for.
"""

__all__ = [
    "bench",
    "connections",
    "coordinator",
    "coordinator_events",
    "forming",
    "inquiry",
    "leader",
    "plans",
    "roster",
    "session_events",
]
