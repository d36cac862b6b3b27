"""Decisions about rounds and jobs, as values: what ended a round, and what follows from it.

- `cause`: what ended a round
- `decision`: what follows, for the round or the job
- `as_json`: both, in logs and in a status
- `wording`: the sentences for people, made from these values alone; nothing reads them back
"""

__all__ = ["as_json", "cause", "decision", "wording"]
