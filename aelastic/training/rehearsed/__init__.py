"""A worker's notes about itself while `aelastic rehearse` runs its script.  None of this is loaded otherwise.

`notes` is the file that it writes, and what both sides know about it; `watch` notes steps, parameters, and habits that
would break recovery in place; `reads` notes reads of the environment before the decorated function is called.
"""

__all__ = ["notes", "reads", "watch"]
