"""Interface of watches, which observe live workers and report those that do not do what is expected of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from aelastic.base.record import Record
from aelastic.diagnose.hangs.options import WatchName
from aelastic.workers.backend import WorkerStart


class Found(Record):
    """A finding: a live worker does not do what is expected of it."""

    generation: int
    local_rank: int
    by: WatchName
    reason: str  # a sentence without a subject, as in "timer 'step' expired 0.01 s ago"
    signum: int | None  # the signal that stops it, as failed; None: it is only reported
    waited_s: float = 0.0  # how long it has hung already; 0 if it does not hang
    has_stacks: bool = False  # stacks have been taken for it


# Never blocks; may be called at any time between `open` and `close`.  Late findings are dropped.
Report: TypeAlias = Callable[[Found], None]


class Watch(ABC):
    """A watch over the workers of one run, generation by generation."""

    def open(self) -> None:  # noqa: B027  some watches open nothing
        """Called once, before any worker is started; the run's scratch folder exists.

        Raises:
            InputError: a resource that it needs is not available.
        """

    @property
    def env(self) -> Mapping[str, str]:
        """Variables for the workers' environment; read once, after `open`."""
        return {}

    def silence(self, now: float) -> tuple[float, Mapping[int, float]]:  # noqa: ARG002
        """Returns how long a worker may be silent (0: forever), and how long each has been, by local rank."""
        return 0.0, {}

    @abstractmethod
    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None:
        """A generation has started; no process of the previous one is alive.

        Args:
            generation: its number.
            starts: how its workers were started, and the files they write to.
            ids: local rank to pid, or the back end's name for it; `None` for a worker that could not be started.
        """

    @abstractmethod
    def ended(self, generation: int, local_rank: int) -> None:
        """A worker's own process has ended."""

    @abstractmethod
    async def run(self) -> None:
        """Watches, during the whole run.  Cancelled at its end."""

    def close(self) -> None:  # noqa: B027  some watches hold nothing
        """Called once, at the end, opened or not."""
