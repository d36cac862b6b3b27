"""Workers as children forked by a fork server: a command, or a function of `multiprocessing`."""

from __future__ import annotations

import os
from types import FunctionType, SimpleNamespace
from typing import Any

from aelastic.base.host.children import taken_status
from aelastic.base.host.files import opened_to_append
from aelastic.workers.backend import WorkerStart
from aelastic.workers.forkserver.command import Launch, PythonCommand, parse


class ForkedProgram:
    """A command, started in a forked interpreter (cold starts use `subprocess.Popen`)."""

    def __init__(self, start: WorkerStart, launch: Launch) -> None:
        with (
            opened_to_append(start.stdout) as out,
            opened_to_append(start.stderr) as err,
            open(os.devnull, "rb") as null,
        ):
            streams = {0: 0 if os.path.lexists("/proc/self/fd/0") else null.fileno()}
            streams |= {number: file.fileno() if file else number for number, file in ((1, out), (2, err))}
            self.pid = launch(command_of(start), streams)

    def reap(self) -> int | None:
        return taken_status(self.pid)

    def wait_status(self) -> int | None:
        return self.reap()


def command_of(start: WorkerStart) -> PythonCommand:
    """Returns the command of a worker's process."""
    if not isinstance(start.entrypoint, str):
        return function_command()
    command = parse(start.entrypoint, [os.fsdecode(arg) for arg in start.args])
    assert command is not None, "the template was started for another command"
    return command


def function_command() -> PythonCommand:
    """Returns the command with which `multiprocessing` would start an interpreter for a function."""
    from multiprocessing import spawn

    words = spawn.get_command_line(pipe_handle=0)
    command = parse(os.fsdecode(words[0]), words[1:])
    assert command is not None
    return command


def forked_context(launch: Launch) -> Any:
    """Returns a context of `multiprocessing` like "spawn", whose processes are forked from a warm interpreter."""
    from multiprocessing import context, popen_spawn_posix, util

    def spawn(path: bytes, words: list[str], fds: tuple[int, ...]) -> int:
        command = parse(os.fsdecode(path), words[1:])
        assert command is not None
        return launch(command, {number: number for number in (0, 1, 2, *sorted({*fds}))})

    # The standard library's own code, except for the call that executes the interpreter.
    ours = SimpleNamespace(**{**vars(util), "spawnv_passfds": spawn})
    usual = popen_spawn_posix.Popen._launch  # type: ignore[attr-defined]  # noqa: SLF001  there is no public way in

    class Popen(popen_spawn_posix.Popen):
        _launch = FunctionType(usual.__code__, {**vars(popen_spawn_posix), "util": ours})

    class Process(context.SpawnProcess):
        _Popen = staticmethod(Popen)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return object.__new__, (context.SpawnProcess,), self.__dict__  # an ordinary one there

    return SimpleNamespace(Process=Process)
