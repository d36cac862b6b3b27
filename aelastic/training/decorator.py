"""The decorator of a training function that recovers in place.  torch is imported when the function is called."""

from __future__ import annotations

import functools
import os

if os.environ.get("AELASTIC_REHEARSAL"):
    from aelastic.training.rehearsed import reads

    reads.watch()

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
    """Calls the function in each round of the job, in the same process, so that its state survives the loss of a rank.

        from aelastic import in_place

        @in_place
        def train(round):
            dist.init_process_group("gloo")
            start = round.share(model, optimizer, load=load)
            for step in round.steps(start, STEPS):
                ...

    The function gets a `Round` before its other arguments.  Its value is returned once all ranks of the node have
    returned theirs.
    Under torchrun and plain Python it is called once; plain Python is a job of one rank.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        from aelastic.training.rounds import run

        return run(function, args, kwargs)

    return call
