"""The agent's side of the fork server: starts it, keeps forked processes parked, turns them into workers.

A parked process waits at its gate, its own socket, and the worker group does not know of it yet.  It is a child of the
agent like any worker (`clone`), so the fork server may die at any moment.  A process that does not answer in time is
killed, and its worker starts cold.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

import anyio
from anyio.abc import TaskGroup

from aelastic.base.host.children import ForkedHelper
from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.workers.backend import WorkerStart
from aelastic.workers.forkserver import preload, priority
from aelastic.workers.forkserver.children import command_of
from aelastic.workers.forkserver.command import Launch, PythonCommand
from aelastic.workers.forkserver.learning import Imports, KeptImports
from aelastic.workers.forkserver.parked import Memory, NoAnswerError, Parked, memory_of
from aelastic.workers.forkserver.server_process import ServerProcess

_log = logging.getLogger(__name__)

# How long the first workers wait for imports that they would otherwise do themselves.
FIRST_TIMEOUT_S = 30.0
# Starting workers get the CPUs first; a worker that fails sooner is replaced by one that is forked on demand.
PARK_DELAY_S = 0.5
# Learned modules are imported while nothing else needs the CPU; if the CPU is never idle, after this time anyway.
IDLE_TIMEOUT_S = 10.0
# Its memory is measured once the next generation is parked, and now and then.
MEASURE_DELAY_S = 3.0
MEASURE_INTERVAL_S = 300.0

ChildT = TypeVar("ChildT")
Preloaded: TypeAlias = tuple[str, ...] | Literal["auto"]


class ForkServer:
    """Starts workers warm if it can.

    Args:
        command: one of the workers' commands; all workers that it can fork have its interpreter and options.
        modules: what to preload; `"auto"`: what the first workers import, while nothing else needs the CPU.
        named: where that setting comes from, for warnings.
        env: the common part of all workers' environments, and the agent's mark.
        differing: names of variables that differ from worker to worker, or from start to start.
        on_measured: takes the memory of its processes, whenever that has changed.
        kept_in: the folder for what is learned; `None`: it is not kept.
    """

    def __init__(
        self,
        command: PythonCommand,
        modules: Preloaded,
        named: str,
        env: Mapping[str, str],
        differing: frozenset[str],
        on_measured: Callable[[Memory], None],
        kept_in: Path | None,
    ) -> None:
        self._command = command
        self._named = named
        self._env = env
        self._on_measured = on_measured
        self._is_auto, self._kept = modules == "auto", KeptImports(kept_in, command)
        known = self._kept.read() if modules == "auto" else modules
        self._core = preload.Preload(known, is_learning=not known)
        self.imports = None if known else Imports()  # only while it learns
        self._is_gathering = False
        self._next: tuple[str, ...] | None = None  # for the process that replaces this one
        self._process = ServerProcess(command, env, sorted(differing), is_learned=self._is_auto)
        self._decided = anyio.Event()  # set once it can fork, or never will
        self._count = 0  # of workers, once there were some
        self._parked: list[Parked] = []
        self.warm: frozenset[int] = frozenset()  # local ranks of the last start whose processes had imported something
        self._tasks: TaskGroup | None = None
        self._logged: set[str] = set()
        self._has_forked = anyio.Event()  # since its memory was measured
        self._start(self._core.modules)

    def _start(self, modules: tuple[str, ...]) -> None:
        is_beside_workers = self._is_auto and bool(modules) and self._count > 0
        try:
            self._process.start(modules, is_beside_workers=is_beside_workers)
        except OSError as error:
            self._handle(preload.Refused(f"it cannot be started: {error}"))

    @property
    def is_importing(self) -> bool:
        """Whether workers start cold now, and may start warm soon."""
        return self._core.phase is preload.Phase.IMPORTING

    @property
    def is_warm(self) -> bool:
        """Whether workers that start now have what they need."""
        return self._core.phase is preload.Phase.READY and not self._core.is_learning

    async def wait_decided(self) -> bool:
        """Waits until its first imports are over, or have taken too long; returns whether they are over."""
        with anyio.move_on_after(FIRST_TIMEOUT_S) as waited:
            await self._decided.wait()
        return not waited.cancelled_caught

    async def run(self) -> None:
        """Follows the process.  Runs until cancelled."""
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            tasks.start_soon(self._measure, name="memory of the fork server")
            try:
                while self._process.is_there:
                    message = await self._process.receive()
                    if message:
                        self._on_message(message)
                        continue
                    await self._end()
                await anyio.sleep_forever()
            finally:
                self._tasks = None

    def _on_message(self, message: dict[str, Any]) -> None:
        match message:
            case {"importing": module}:
                self._handle(preload.Importing(module))
            case {"left_out": module, "why": why}:
                self._handle(preload.LeftOut(module, why))
            case {"printed": module}:
                self._warn(f"{module} prints during its import: {self._process.read_printed()}")
            case {"generators": names, "count": count}:
                some = ", ".join(names) + (f" and {count - len(names)} more" if count > len(names) else "")
                self._warn(f"all workers get the same random numbers from {some}: make the generators in the script")
            case {"refused": why}:
                self._handle(preload.Refused(why))
            case {"again": _}:
                self._handle(preload.Tripped())
            case {"ready": _}:
                self._handle(preload.Ready())
                self._park(self._count)
                self._has_forked.set()

    async def _end(self) -> None:
        """Takes the exit status of the process, after its end of the socket was closed."""
        exitcode = await self._process.take_status(is_importing=self.is_importing)
        if self._next is not None:
            modules, self._next = self._next, None
            self._start(modules)
            return
        self._handle(preload.Ended(exitcode, self._process.read_printed()))

    def _handle(self, event: preload.Event) -> None:
        for action in self._core.handle(event, clock.now() if self._tasks else 0.0):
            match action:
                case preload.Start():
                    self._start(action.modules)
                case preload.Replace():
                    self._next = action.modules
                    self._decided = anyio.Event()
                    self._retire()
                case preload.Stop():
                    self._retire()
                case preload.Warn():
                    self._warn(action.text)
        if self._core.phase is not preload.Phase.IMPORTING:
            self._decided.set()

    def _retire(self) -> None:
        """Ends the process, and its parked processes; `_end` follows."""
        self._process.retire()
        for parked in self._parked:
            self._bury(parked)
        self._parked = []

    def _warn(self, text: str) -> None:
        if text not in self._logged:
            self._logged.add(text)
            _log.warning("%s: %s", self._named, text)

    def _warn_of_cold(self, why: str, ranks: list[int]) -> None:
        """Warns once why some workers start cold."""
        if why not in self._logged:
            self._logged.add(why)
            some = f"worker {ranks[0]} starts" if len(ranks) == 1 else f"workers {', '.join(map(str, ranks))} start"
            _log.warning("%s: %s; %s cold", self._named, why, some)

    async def fork(
        self, starts: Sequence[WorkerStart], begin: Callable[[WorkerStart, Launch], ChildT]
    ) -> dict[int, ChildT]:
        """Turns forked processes into workers; returns those that succeeded, by local rank.

        If cancelled, it leaves none.

        Args:
            begin: starts one worker through a function that replaces an exec.
        """
        if not self._count and not await self.wait_decided():  # before the first workers; later ones cannot wait
            self._warn(f"imports took more than {FIRST_TIMEOUT_S:g} s; workers start cold until they finish")
        self._count = max(self._count, len(starts))  # fewer are started to replace lost ones
        self._has_forked.set()
        self._park(len(starts))
        chosen, self._parked = self._parked[: len(starts)], self._parked[len(starts) :]
        begun: dict[int, ChildT] = {}
        refused: dict[str, list[int]] = {}
        is_learning = self._core.is_learning
        try:
            async with anyio.create_task_group() as tasks:
                for parked, start in zip(chosen, starts, strict=False):
                    tasks.start_soon(self._make_worker, parked, start, begin, begun, refused)
        except BaseException:
            for parked in chosen:
                self._bury(parked)
            raise
        for why, ranks in refused.items():
            self._warn_of_cold(why, sorted(ranks))
        if any(not parked.pid and parked.forked_by == self._process.pid for parked in chosen):
            self._process.kill()  # it hangs, and would fork when nobody waits any more; another one replaces it
        others = self.warm - {start.local_rank for start in starts}
        self.warm = others if is_learning else others | frozenset(begun)
        if self._tasks is not None:
            self._tasks.start_soon(self._park_later, name="park")
            if self._core.is_learning and self.imports is not None and not self._is_gathering:
                self._is_gathering = True
                self._tasks.start_soon(self._learn, self.imports, name="learn")
        return begun

    async def _learn(self, imports: Imports) -> None:
        """Waits until the first workers have imported what they need, then makes the fork server preload it."""
        self._handle(preload.Learned(await imports.gather()))
        imports.close()
        self.imports = None
        while not self._decided.is_set():
            with anyio.move_on_after(IDLE_TIMEOUT_S):
                await self._decided.wait()
                break
            with suppress(OSError):  # it has ended, and another one replaces it
                priority.restore(self._process.pid, os.sched_getscheduler(0))
        if imports.are_whole and self.is_warm:  # without modules that were left out
            await run_sync(self._kept.write, self._core.modules, abandon_on_cancel=True)

    async def _park_later(self) -> None:
        await anyio.sleep(PARK_DELAY_S)
        self._park(self._count)

    async def fork_helper(self, words: Sequence[str], fds: Mapping[int, int]) -> ForkedHelper | None:
        """Starts one of our programs in a forked process; returns `None` if no process can be forked.

        Args:
            words: a script, and its arguments.
            fds: as in `Parked.launch`, without streams: it has none.
        """
        parked = self._fork()
        if parked is None:
            return None
        try:
            command = PythonCommand(self._command.interpreter, ("-P",), "script", words[0], tuple(words))
            await parked.prepare(command, self._env, is_helper=True)
            with open(os.devnull, "r+b") as null:  # noqa: ASYNC230  not on a disk
                parked.launch(command, {**dict.fromkeys(range(3), null.fileno()), **fds})
        except BaseException as error:
            self._bury(parked)
            if isinstance(error, NoAnswerError | OSError):
                return None
            raise
        parked.let_go()
        return ForkedHelper(parked.pid)

    async def _measure(self) -> None:
        """Reports the memory of the process and of parked processes, when it has changed."""
        reported = Memory(0, 0)
        while True:
            with anyio.move_on_after(MEASURE_INTERVAL_S):
                await self._has_forked.wait()
                self._has_forked = anyio.Event()
                await anyio.sleep(MEASURE_DELAY_S)
            measured = await run_sync(memory_of, self._process.pid, abandon_on_cancel=True)
            if (measured.parked, measured.pss_bytes >> 20) != (reported.parked, reported.pss_bytes >> 20):
                self._on_measured(reported := measured)

    def _park(self, count: int) -> None:
        """Requests forks until this many processes are parked; each announces itself at its gate."""
        while len(self._parked) < count and (parked := self._fork()) is not None:
            self._parked.append(parked)

    def _fork(self) -> Parked | None:
        if self._core.phase is not preload.Phase.READY or not self._process.is_there:
            return None
        try:
            return self._process.fork()
        except OSError as error:
            self._warn(f"cannot fork a worker ({error}); workers start cold")
            return None

    async def _make_worker(
        self,
        parked: Parked,
        start: WorkerStart,
        begin: Callable[[WorkerStart, Launch], ChildT],
        begun: dict[int, ChildT],
        refused: dict[str, list[int]],
    ) -> None:
        try:
            await parked.prepare(command_of(start), start.env)
            child = begin(start, partial(parked.launch, learning=None if self.imports is None else self.imports.writer))
        except (NoAnswerError, OSError) as error:
            why = (
                str(error)
                if isinstance(error, NoAnswerError)
                else f"a forked process does not accept requests ({error})"
            )
            refused.setdefault(why, []).append(start.local_rank)
            self._bury(parked)
        else:
            parked.let_go()
            begun[start.local_rank] = child

    def _bury(self, parked: Parked) -> None:
        if self._tasks is not None:
            self._tasks.start_soon(parked.end, name="end of a parked process")

    async def aclose(self) -> None:
        """Ends the process, and parked processes."""
        if self._process.is_there:
            await self._process.take_status(is_importing=self.is_importing)
        async with anyio.create_task_group() as tasks:
            for parked in self._parked:
                tasks.start_soon(parked.end)
        self._parked = []
        if self.imports is not None:
            self.imports.close()
        self._process.close()
