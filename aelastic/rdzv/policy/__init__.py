"""What follows from the end of a round: whether workers are started again, when, and what that costs.

`rules` reads what `--restart-policy` says; `ledger` is what is remembered from one end to the next; `restart_policy`
decides by both.  Pure.
"""

__all__ = ["ledger", "restart_policy", "rules"]
