"""Workers as processes of this machine.

A worker is the leader of its own session.  Only the worker itself is asked to end, so that processes it needs for
a last checkpoint (such as data loaders) live as long as it does; once it is gone, or at SIGKILL, the whole session
is killed.  Its exit is an event: a pidfd becomes readable (`pidfd_open(2)`).

A worker stays a zombie until its session is empty.  A zombie's pid, and so the session's number, is not given to
another process: nothing unrelated can ever be signalled.  (Only a fork server reaps its children itself, at once; then
the number is safe as long as a process lives in the session.)

`guard.py` kills the remaining processes when the agent itself dies, and the workers of a frozen agent.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from aelastic.base.host import proc_table
from aelastic.base.host.children import orphans, pidfd_of, reap_orphans, wait_ended, waited_for
from aelastic.base.host.files import text_of
from aelastic.base.host.shortages import shortage_of
from aelastic.base.loop.threads import in_thread, run_sync
from aelastic.errors import HostError
from aelastic.workers.backend import WorkerBackend, WorkerExit, WorkerStart
from aelastic.workers.children import Child, Function, Program
from aelastic.workers.guard import is_guard
from aelastic.workers.guard_process import GuardProcess

if TYPE_CHECKING:
    from aelastic.workers.forkserver.command import Launch
    from aelastic.workers.forkserver.fork_server import ForkServer

# The exit codes of shells for a program that does not exist, or cannot be executed (`sh(1)`).
NOT_FOUND = 127
NOT_EXECUTABLE = 126
# For a child whose status another part of this process has taken (`waitpid(-1)`).
STATUS_LOST = 255
# How often a fork server is asked how its child has ended, for a second each: it may wait for a CPU, like us.
STATUS_TRIES = 30
# A killed process is gone at once, or is slow to tear down; meanwhile we look for others.
CLEAR_LOOK_AGAIN_S = 0.05
# Orphans may fork while they are killed, or survive SIGKILL; the guard of an agent in our agent needs its own time.
ORPHANS_TIMEOUT_S = 5.0
# As long as a worker may take to start from our own fork server.
FUNCTION_START_S = 30.0
# Pauses between tries to start a worker: the host may soon have what it refuses now, when other jobs end.
START_PAUSES_S = (0.1, 0.3, 1.0, 3.0)


class _Worker:
    """A started worker, until its session is empty and its status is taken."""

    def __init__(self, child: Child, monitor_interval: float) -> None:
        self._child = child
        self._monitor_interval = monitor_interval
        self.pid = child.pid
        self._pidfd = pidfd_of(child.pid)
        waited_for.add(child.pid)

    async def wait(self) -> int:
        """Waits for the exit code; the process stays a zombie."""
        if self._pidfd is not None:
            await anyio.wait_readable(self._pidfd)
        else:  # the kernel cannot notify us; or a fork server had taken the status before we looked
            while self._status() is None and proc_table.is_alive(self.pid):  # noqa: ASYNC110
                await anyio.sleep(self._monitor_interval)
        for _ in range(STATUS_TRIES):
            if (code := self._status()) is None:  # not our child but a fork server's
                code = await run_sync(self._child.wait_status)
            if code is not None:
                return code
        return STATUS_LOST

    def _status(self) -> int | None:
        """Returns the exit code if the process has ended, without reaping it."""
        try:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None if proc_table.process(self.pid) or isinstance(self._child, Function) else STATUS_LOST
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    async def clear(self) -> None:
        """Kills the rest of the session, waits until it is gone, then takes the status."""
        # The number is not reused while the leader is a zombie, or a process lives in the session.
        is_zombie = not isinstance(self._child, Function) and self._status() != STATUS_LOST
        if is_zombie or self.others():
            proc_table.kill_group(self.pid)
        while left := self.others():
            for entry in left:
                proc_table.kill(entry.pid)
            with anyio.move_on_after(CLEAR_LOOK_AGAIN_S):  # the next look finds processes forked meanwhile
                for entry in left:
                    await wait_ended(entry.pid)
        self.give_up()

    def give_up(self) -> None:
        """Takes the status if there is one, and releases the process."""
        self._child.reap()
        waited_for.discard(self.pid)
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None

    def others(self) -> list[proc_table.Process]:
        """Returns the live processes in the worker's session, except the worker."""
        return [entry for entry in proc_table.session_members({self.pid}) if entry.pid != self.pid]

    def signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):  # it has ended, and its `Exited` is on the way
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, signum)
            else:
                os.kill(self.pid, signum)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        for entry in self.others():
            proc_table.kill(entry.pid)


class LocalWorkers(WorkerBackend):
    """Runs workers as processes of this machine (torch: `LocalElasticAgent`).

    Args:
        start_method: for functions, as in `multiprocessing`.
        monitor_interval: seconds between two looks if the kernel has no pidfds.
        mark: a string in the environment of every worker, and of no other process: the guard kills processes with it.
        scratch: a folder that the guard removes if the agent dies; `None` for none.
        fork_server: starts workers warm if it can; `None`: all start cold.
        silence_s: the guard kills the workers if this agent is frozen for this long; `None`: never.
    """

    def __init__(
        self,
        *,
        start_method: str,
        monitor_interval: float,
        mark: str,
        scratch: Path | None = None,
        fork_server: ForkServer | None = None,
        silence_s: float | None = None,
    ) -> None:
        self._start_method = start_method
        self._monitor_interval = monitor_interval
        self._guard = GuardProcess(mark, scratch, silence_s)
        self._guard.ensure()
        self._fork_server = fork_server
        self._workers: dict[int, _Worker | WorkerExit] = {}
        self._was_frozen = False  # and the guard has killed these workers

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._guard.run, name="guard")
            if self._fork_server is not None:
                tasks.start_soon(self._fork_server.run, name="fork server")

    async def start(self, starts: Sequence[WorkerStart]) -> Mapping[int, int | None]:
        self._workers = {}
        self._guard.take_killed()
        self._was_frozen = False
        await self._end_orphans()
        return await self._start_all(starts)

    async def replace(self, start: WorkerStart) -> int | None:
        return (await self._start_all([start]))[start.local_rank]

    async def _start_all(self, starts: Sequence[WorkerStart]) -> Mapping[int, int | None]:
        plain = [start for start in starts if not start.wrap]
        forked = {} if self._fork_server is None else await self._fork_server.fork(plain, self._forked_child)
        workers: dict[int, _Worker | WorkerExit] = {rank: self._follow(child) for rank, child in forked.items()}
        self._workers |= workers
        try:
            for start in starts:
                if start.local_rank not in forked:
                    workers[start.local_rank] = await self._start_patiently(start)
                    self._workers |= workers
        except BaseException:
            with anyio.CancelScope(shield=True):
                started = [(rank, worker) for rank, worker in workers.items() if isinstance(worker, _Worker)]
                for _, worker in started:
                    worker.kill()
                for rank, worker in started:
                    await worker.wait()
                    await self.clear(rank)
            raise
        return {rank: worker.pid if isinstance(worker, _Worker) else None for rank, worker in workers.items()}

    def is_warm(self, local_rank: int) -> bool:
        return self._fork_server is not None and local_rank in self._fork_server.warm

    async def _end_orphans(self) -> None:
        """Kills processes that ended workers have left outside their sessions, if this process adopts them."""
        with anyio.move_on_after(ORPHANS_TIMEOUT_S):
            while left := [entry for entry in orphans() if entry.state not in "ZX"]:
                for entry in left:
                    if not is_guard(entry.pid):  # of an agent in our agent: it still has work to do, and ends by itself
                        proc_table.kill(entry.pid)
                await anyio.sleep(CLEAR_LOOK_AGAIN_S)
        reap_orphans()

    async def _start_patiently(self, start: WorkerStart) -> _Worker | WorkerExit:
        """Starts a worker, waiting if the host refuses: one restart per refusal would use them up within a second.

        Raises:
            HostError: the host keeps refusing.
        """
        for pause_s in (*START_PAUSES_S, None):
            try:
                self._guard.ensure()
                return await self._start(start)
            except OSError as error:
                if pause_s is None:
                    why, rank = shortage_of(error) or error, start.local_rank
                    raise HostError(
                        f"the worker of local rank {rank} cannot be started: {why}", topic="a-worker-cannot-be-started"
                    ) from error
                await anyio.sleep(pause_s)
        raise AssertionError("the last try returns or raises")

    async def _start(self, start: WorkerStart) -> _Worker | WorkerExit:
        try:
            child: Child = Program(start) if isinstance(start.entrypoint, str) else await self._start_function(start)
        except OSError as error:
            if shortage_of(error):
                raise
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            return WorkerExit(code, note=f"could not be started: {error}")
        return self._follow(child)

    async def _start_function(self, start: WorkerStart) -> Function:
        """Starts a function, in a thread: the child, or `multiprocessing`'s fork server, has to read its input.

        Raises:
            HostError: it does not read it.
        """
        if self._start_method == "fork":
            return Function(start, self._start_method)
        started: Future[Function] = Future()  # cancelled if nobody waits for it any more

        def start_child() -> None:
            child = Function(start, self._start_method)
            if started.set_running_or_notify_cancel():
                started.set_result(child)
            else:
                proc_table.kill(child.pid)

        with anyio.CancelScope(shield=True):  # a child whose start has begun must be followed
            try:
                await in_thread(start_child, within_s=FUNCTION_START_S)
            except TimeoutError:
                started.cancel()
        if started.cancelled():
            why = f"no answer from multiprocessing ({self._start_method}) within {FUNCTION_START_S:g} s"
            raise HostError(
                f"the worker of local rank {start.local_rank} cannot be started: {why}",
                topic="a-worker-cannot-be-started",
            )
        return started.result()

    def _forked_child(self, start: WorkerStart, launch: Launch) -> Child:
        from aelastic.workers.forkserver.children import ForkedProgram, forked_context

        if isinstance(start.entrypoint, str):
            return ForkedProgram(start, launch)
        return Function(start, self._start_method, forked_context(launch))

    def _follow(self, child: Child) -> _Worker:
        self._guard.send("+", child.pid)
        return _Worker(child, self._monitor_interval)

    async def wait(self, local_rank: int) -> WorkerExit:
        worker = self._workers[local_rank]
        if isinstance(worker, WorkerExit):
            return worker
        code = await worker.wait()
        self._was_frozen |= self._guard.take_killed()
        return WorkerExit(code, by_guard=self._was_frozen and code == -signal.SIGKILL)

    async def clear(self, local_rank: int) -> None:
        worker = self._workers[local_rank]
        if isinstance(worker, _Worker):
            await worker.clear()
            self._guard.send("-", worker.pid)
            self._workers[local_rank] = WorkerExit(0)

    def stop(self, local_rank: int, signum: int) -> bool:
        worker = self._workers[local_rank]
        if isinstance(worker, WorkerExit):
            return False
        is_running = proc_table.is_alive(worker.pid)
        if signum == signal.SIGKILL:
            worker.kill()
        else:
            worker.signal(signum)
        return is_running

    def describe(self, local_rank: int) -> str:
        worker = self._workers[local_rank]
        if isinstance(worker, WorkerExit):
            return super().describe(local_rank)
        found = (proc_table.process(worker.pid), *worker.others())
        left = [entry for entry in found if entry and entry.state not in "ZX"]
        return f"local rank {local_rank}: " + (", ".join(_describe(entry) for entry in left) or "nothing")

    async def aclose(self) -> None:
        """Kills all live processes that the agent started, including daemons, and waits until they are gone."""
        if self._fork_server is not None:
            await self._fork_server.aclose()
        await self._guard.aclose()
        await self._end_orphans()
        for worker in self._workers.values():
            if isinstance(worker, _Worker):  # the agent failed, or gave up on it
                worker.give_up()


def _describe(entry: proc_table.Process) -> str:
    place = text_of(f"/proc/{entry.pid}/wchan")
    sleep = " (uninterruptible sleep)" if entry.state == "D" else ""
    return f"pid {entry.pid} in state {entry.state}{sleep}" + (f", in {place}" if place not in {"", "0"} else "")
