"""The watches of a run that find workers that hang; most jobs have none."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
from anyio.abc import TaskGroup

from aelastic.agent.group.worker_env import STUCK_VARIABLE
from aelastic.spec import WorkerSpec
from aelastic.workers.backend import WorkerStart

if TYPE_CHECKING:
    from aelastic.agent.watches.watch import Found, Watch

_log = logging.getLogger(__name__)
# As in torch's agent: any other value is off.
FILE_TIMER_VARIABLE = "TORCHELASTIC_ENABLE_FILE_TIMER"


class Watches:
    """The watches of one run, created as the spec and the environment require, and run together.

    A watch is created, and its module imported, only if the spec or the environment requires it.  Its findings go to
    the supervisor, which decides.  A watch that raises is a bug in aelastic; it is logged, and the job continues
    without it.

    Args:
        spec: the user's settings.
        env: the agent's environment.
        scratch: the run's own folder, which need not exist before `open`.
        count_matches: counts a worker's output that is as expected (`logs.RunLogs`).
        step_s: returns the median step, if it is known (`Progress`).
        waiting: returns local ranks that wait because they are asked to.
        on_found: receives each finding, in its own task.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        env: Mapping[str, str],
        scratch: Path,
        count_matches: Callable[[int], Awaitable[int]],
        step_s: Callable[[], float | None],
        waiting: Callable[[], Collection[int]],
        on_found: Callable[[Found], Coroutine[Any, Any, None]],
    ) -> None:
        self._on_found = on_found
        self._tasks: TaskGroup | None = None
        self._watches: list[Watch] = []
        if env.get(FILE_TIMER_VARIABLE) == "1":
            from aelastic.agent.watches.file_timer import FileTimerServer

            self._watches.append(FileTimerServer(env, scratch, self._report))
        if spec.finds_hangs or spec.expect_output is not None or env.get(STUCK_VARIABLE):
            from aelastic.agent.watches.activity import ActivitySampler, stuck_timeout_of

            are_reported = spec.hang_timeout_steps is not None and spec.progress is None
            self._watches.append(
                ActivitySampler(
                    spec,
                    count_matches,
                    self._report,
                    stuck_timeout_s=stuck_timeout_of(env),
                    step_s=step_s,
                    waiting=waiting,
                    steps_are_reported=are_reported,
                )
            )

    @property
    def env(self) -> dict[str, str]:
        """Variables for the workers' environment."""
        return {name: value for watch in self._watches for name, value in watch.env.items()}

    def open(self) -> None:
        """Creates what the watches need.

        Raises:
            InputError: a watch cannot get what it needs.
        """
        for watch in self._watches:
            watch.open()

    def started(self, generation: int, starts: Sequence[WorkerStart], ids: Mapping[int, Any]) -> None:
        for watch in self._watches:
            watch.started(generation, starts, ids)

    def ended(self, generation: int, local_rank: int) -> None:
        for watch in self._watches:
            watch.ended(generation, local_rank)

    def silence(self, now: float) -> tuple[float, Mapping[int, float]]:
        """Returns the `silence` of the watch that counts signs of life; (0, {}) if none does."""
        return max((watch.silence(now) for watch in self._watches), key=lambda found: found[0], default=(0.0, {}))

    async def run(self) -> None:
        """Runs all of them, until cancelled."""
        if not self._watches:
            return
        async with anyio.create_task_group() as self._tasks:
            for watch in self._watches:
                self._tasks.start_soon(_run, watch, name=type(watch).__name__)

    def _report(self, found: Found) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(self._on_found, found, name=f"found {found.local_rank}")

    def close(self) -> None:
        for watch in self._watches:
            watch.close()


async def _run(watch: Watch) -> None:
    try:
        await watch.run()
    except Exception:  # noqa: BLE001  the job is worth more than a watch
        _log.exception("watch %s raised and was disabled (a bug in aelastic: please report it)", type(watch).__name__)
