"""How the workers of one generation end: which have failed, which were stopped, and what is left of the others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from aelastic.failures.failure import ProcessFailure
from aelastic.group.phases import KILL_COUNT_MAX


@dataclass(slots=True)
class Exits:
    """Of one generation, by local rank."""

    failed: dict[int, ProcessFailure] = field(default_factory=dict[int, ProcessFailure])  # as they failed
    # Those that ended because we asked them to, with what they raised themselves, if they did.
    stopped: dict[int, ProcessFailure | None] = field(default_factory=dict[int, ProcessFailure | None])
    alive: set[int] = field(default_factory=set[int])  # those whose own process has not ended
    asked: set[int] = field(default_factory=set[int])  # those that were sent a signal to end with
    is_draining: bool = False  # some were, since their job is about to be interrupted
    is_saving: bool = False  # and no others yet
    left: set[int] = field(default_factory=set[int])  # those of which something is alive
    kill_count: int = 0  # how often what is left was sent SIGKILL

    @property
    def unended(self) -> tuple[int, ...]:
        """Local ranks of which something is still alive."""
        return tuple(sorted(self.left))

    @property
    def has_children(self) -> bool:
        """Whether a worker has ended whose children may be alive."""
        return len(self.left) > len(self.alive)

    @property
    def is_killing(self) -> bool:
        """Whether the workers were sent SIGKILL."""
        return self.kill_count > 0

    @property
    def may_kill(self) -> bool:
        """Whether SIGKILL is to be tried, or tried again."""
        return self.kill_count < KILL_COUNT_MAX

    def begin(self, local_ranks: Iterable[int]) -> None:
        """The workers are started."""
        self.alive = set(local_ranks)
        self.left = set(self.alive)

    def ask(self, local_ranks: Iterable[int]) -> None:
        """Workers are sent a signal to end with."""
        self.is_saving = False
        self.asked.update(local_ranks)

    def drain(self, local_ranks: Iterable[int]) -> None:
        """Workers are to save, and end."""
        self.ask(local_ranks)
        self.is_draining = self.is_saving = True

    def fail(self, local_rank: int, failure: ProcessFailure) -> None:
        """A worker has failed by itself, or was found unhealthy."""
        self.failed[local_rank] = failure

    def on_killed(self) -> None:
        """What is left was sent SIGKILL."""
        self.kill_count += 1

    def on_exited(self, local_rank: int) -> None:
        self.alive.discard(local_rank)

    def on_stopping(self, local_rank: int, failure: ProcessFailure | None, raised: ProcessFailure | None) -> None:
        """A worker has ended while all are stopped: it failed before it could be asked, or is a victim."""
        if local_rank in self.failed:
            return  # it was found unhealthy, and that has been told
        if failure is not None and not self.is_draining:
            self.fail(local_rank, failure)
        else:
            self.stopped[local_rank] = raised or failure

    def on_cleared(self, local_rank: int) -> None:
        """Nothing of a worker is left."""
        self.alive.discard(local_rank)
        self.left.remove(local_rank)

    def validate(self) -> None:
        assert self.alive <= self.left, "of a worker that is alive something is left"
        assert self.failed.keys().isdisjoint(self.stopped), "a worker is a culprit or a victim"
        assert self.kill_count <= KILL_COUNT_MAX, "SIGKILL is tried a limited number of times"
