"""accelerate in a decorated function: `reset_accelerate` before each `Accelerator()`."""

from __future__ import annotations

from accelerate.state import AcceleratorState, GradientState

# Private, but the only way to reset them.
_reset_state = AcceleratorState._reset_state  # noqa: SLF001
_reset_gradient_state = GradientState._reset_state  # noqa: SLF001


def reset_accelerate() -> None:
    """Makes accelerate forget the process group of the last round.  Call it before `Accelerator()`, in each round.

    accelerate keeps its state in singletons.  Without the reset, it would make no process group in the second round.
    """
    _reset_state(reset_partial_state=True)
    _reset_gradient_state()
