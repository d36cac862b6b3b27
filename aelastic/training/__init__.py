"""What a training script imports: recovery in place, and notices of an interruption.

Importing this package costs a script neither torch nor the agent's code.
"""

from __future__ import annotations

from aelastic.training.decorator import in_place as in_place
from aelastic.training.late import Late as Late
from aelastic.training.late import Value as Value

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from aelastic.training.rounds import Round
    from aelastic.training.sampler import ResumableSampler

__all__ = ["Late", "ResumableSampler", "Round", "Value", "decorator", "in_place", "messages"]


def __getattr__(name: str) -> Any:
    """Imports what needs torch when it is first used."""
    if name == "ResumableSampler":
        from aelastic.training.sampler import ResumableSampler

        return ResumableSampler
    if name == "Round":
        from aelastic.training.rounds import Round

        return Round
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
