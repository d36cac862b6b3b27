"""Programs of other people that an agent runs: py-spy, or one that watches for notices."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio

from aelastic.host import proc_table
from aelastic.host.reaping import helpers, wait_ended, waited_for

# A killed process is gone at once, or not soon.
REAP_TIMEOUT_S = 0.1


@asynccontextmanager
async def program(
    command: str | Sequence[str], env: Mapping[str, str], *, stderr: int | None = None
) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A program that runs, with its stdout as a pipe; kills it, and what it has started, at the end of the block.

    It has a session of its own: a Ctrl-C at the terminal is not for it.  Nothing else takes its status, or takes it for
    an orphan.

    Args:
        command: of a shell, if it is a text.
        stderr: as in `subprocess.Popen`.

    Raises:
        OSError: it cannot be started.
    """
    popen = subprocess.Popen(  # noqa: ASYNC220  starting takes a millisecond, and what follows does not block
        command,
        shell=isinstance(command, str),
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        start_new_session=True,
    )
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
