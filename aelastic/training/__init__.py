"""What a training script imports: recovery in place, and notices of an interruption.

Importing this package costs a script neither torch nor the agent's code.
"""

from __future__ import annotations

from aelastic.training.decorator import in_place as in_place
from aelastic.training.late import Late as Late
from aelastic.training.late import Value as Value

__all__ = ["Late", "Value", "decorator", "in_place", "messages"]
