"""A watch: it looks at living workers, and says who does not do what is expected of it.

`watching.py` makes those that are on, and carries what they find to the supervisor, which decides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from aelastic.core.record import Record
from aelastic.group.backend import WorkerStart
from aelastic.group.events import WatchName


class Found(Record):
    """A living worker does not do what is expected of it."""

    generation: int
    local_rank: int
    by: WatchName
    reason: str  # a sentence without a subject, as in "timer 'step' expired 0.01 s ago"
    signum: int | None  # what it is to be stopped with, and then it has failed; None: it is only told


# Never blocks; may be called at any time between `open` and `close`.  What comes too late is dropped.
Report: TypeAlias = Callable[[Found], None]


class Watch(ABC):
    """Of the workers of one run, generation by generation."""

    def open(self) -> None:  # noqa: B027  nothing to open is a fair answer
        """Called once, before any worker is started; the run's scratch folder is there.

        Raises:
            InputError: what it needs can't be had.
        """

    @property
    def env(self) -> Mapping[str, str]:
        """What workers are told besides, in their environment; asked once, after `open`."""
        return {}

    @abstractmethod
    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None:
        """A generation is started; nothing lives of the one before.

        Args:
            generation: its number.
            starts: how its workers were started, and the files they write to.
            ids: local rank to pid, or to what the back end calls it; `None` for who could not be started.
        """

    @abstractmethod
    def ended(self, generation: int, local_rank: int) -> None:
        """A worker's own process has ended."""

    @abstractmethod
    async def run(self) -> None:
        """Watches, during the whole run.  Cancelled at its end."""

    def close(self) -> None:  # noqa: B027  nothing to give back is a fair answer
        """Called once, at the end, opened or not."""
