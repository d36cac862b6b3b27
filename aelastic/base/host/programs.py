"""Third-party programs that an agent runs: py-spy, a health check, or one that watches for notices."""

from __future__ import annotations

import os
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

import anyio

from aelastic.base.host import proc_table
from aelastic.base.host.children import helpers, wait_ended, waited_for

# A killed process is gone either at once or not soon.
REAP_TIMEOUT_S = 0.1


class ProgramError(Exception):
    """A program cannot be started, or writes too much; the message is worded to follow the program's name."""


@asynccontextmanager
async def program(
    command: str | Sequence[str], env: Mapping[str, str], *, stderr: int | None = None
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """Runs a program, with its stdout as a pipe; kills it, and the processes it has started, at the end of the block.

    It has its own session, so it does not get a Ctrl-C at the terminal.  Nothing else takes its status, or mistakes it
    for an orphan.

    Args:
        command: of a shell, if it is a text.
        stderr: as in `subprocess.Popen`.

    Raises:
        ProgramError: it cannot be started.
    """
    try:
        popen = subprocess.Popen(  # noqa: ASYNC220  starting takes a millisecond, and what follows does not block
            command,
            shell=isinstance(command, str),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
        )
    except OSError as error:
        raise ProgramError(f"cannot be started ({error.strerror or error})") from None
    waited_for.add(popen.pid)
    helpers.add(popen.pid)
    try:
        yield popen
    finally:
        proc_table.kill_group(popen.pid)
        with anyio.move_on_after(REAP_TIMEOUT_S, shield=True):
            await wait_ended(popen.pid)
        popen.poll()
        waited_for.discard(popen.pid)
        helpers.discard(popen.pid)
        for stream in (popen.stdout, popen.stderr):
            if stream is not None:
                stream.close()


async def output_of(
    command: str | Sequence[str], env: Mapping[str, str], *, bytes_max: int
) -> tuple[int | None, str, str]:
    """Runs a program to its end; returns its exit code and its output on stdout and stderr.

    Processes that it has started, and that may keep the pipes open, are killed with it.  If the caller is cancelled, it
    is killed as well.

    Args:
        command: of a shell, if it is a text.
        bytes_max: a program that writes more than that to one of them is killed.

    Raises:
        ProgramError: it cannot be started, or writes too much.
    """
    async with program(command, env, stderr=subprocess.PIPE) as popen:
        assert popen.stdout is not None and popen.stderr is not None
        written = {pipe.fileno(): bytearray() for pipe in (popen.stdout, popen.stderr)}
        async with anyio.create_task_group() as tasks:
            for fd, into in written.items():
                os.set_blocking(fd, False)
                tasks.start_soon(_read, fd, into, bytes_max, tasks.cancel_scope)
            await wait_ended(popen.pid)
            tasks.cancel_scope.cancel()
        for fd, into in written.items():
            _read_what_is_there(fd, into, bytes_max)
        if any(len(each) > bytes_max for each in written.values()):
            raise ProgramError(f"wrote more than {bytes_max >> 10} KiB")
    output, complained = (each.decode(errors="replace") for each in written.values())
    return popen.returncode, output, complained


async def _read(fd: int, into: bytearray, bytes_max: int, both: anyio.CancelScope) -> None:
    """Reads to the end, or until it is too much: then it waits neither for the other pipe nor for the end."""
    while not _read_what_is_there(fd, into, bytes_max):
        await anyio.wait_readable(fd)
    if len(into) > bytes_max:
        both.cancel()


def _read_what_is_there(fd: int, into: bytearray, bytes_max: int) -> bool:
    """Reads available data; returns whether that was the end, or too much."""
    with suppress(BlockingIOError):
        while len(into) <= bytes_max and (chunk := os.read(fd, 1 << 16)):
            into += chunk
        return True
    return False
