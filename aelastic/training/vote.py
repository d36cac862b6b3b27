"""Before the first update of a step, all ranks vote: each has its gradients, and needs no other rank until the commit.

An update destroys the step before it.  If ranks began updates on their own, a loss could leave one replica group a step
ahead of another: its ranks have lost step n, and ranks that still wait for gradients will never reach n + 1.

The vote is a barrier.  When the round ends, a rank is in one of three places:

- It has not voted.  It keeps step n, and no other rank passes the barrier.
- It has passed.  It updates and commits n + 1, and no other rank is left behind: all have voted.
- It is cut while it waits, and cannot tell what the others saw.  It copies step n, then updates and commits as well.
  It has both steps until the survivors have compared what they have.

So all survivors have a step in common, whichever ranks die when.  Nothing decides between them, neither a store nor an
agent, so this also holds if a node is lost with all that runs there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from aelastic.training.kept import Kept, Older
from aelastic.training.shared_state.state import State


class Vote:
    def __init__(self, kept: Kept, wait_for_all: Callable[[], object]) -> None:
        """Holds one vote after another while the round lasts.

        Args:
            kept: gets the copy.
            wait_for_all: returns once all ranks have called it; raises RuntimeError if a rank is lost meanwhile.
        """
        self._kept = kept
        self._wait_for_all = wait_for_all
        self._error: RuntimeError | None = None

    def hold(self) -> None:
        """Called when this rank has its gradients.  If it returns, the update must be made.

        Raises:
            RuntimeError: the vote was cut, and there is no memory for a copy: this rank keeps the step that it has.
        """
        try:
            self._wait_for_all()
        except RuntimeError as error:
            self._keep_copy(error)
            self._error = error

    def _keep_copy(self, error: RuntimeError) -> None:
        try:
            self._kept.older = Older(self._kept.step, copy_of(self._kept))
        except torch.OutOfMemoryError:
            raise error from None

    def raise_if_cut(self) -> None:
        """Called after the commit.

        Raises:
            RuntimeError: the error that cut the vote.
        """
        error, self._error = self._error, None
        if error is not None:
            raise error


def copy_of(kept: Kept) -> State:
    """Returns the state at the last commit.  Nothing but buffers has changed since."""
    with kept.buffers_as_committed():
        return State(kept.objects).copied()
