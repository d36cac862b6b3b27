"""Takes the Python stacks of processes of this machine, without their help.

Two sources are asked, one after the other, until one answers:

- the process's memory (`interpreter.py`), if it runs the same Python as the agent.  The process need not help or
  even run, and no program is needed;
- py-spy, a program that reads the memory of any Python.

All processes are looked at at once, and each has an answer within `TIMEOUT_S`: a stack, or why not.
Nothing is left behind, whatever a source does; nothing here raises for what a process or a source does.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

import anyio

from aelastic.base.host import proc_table
from aelastic.base.host.programs import ProgramError, output_of
from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.base.record import Record
from aelastic.diagnose.stacks.format import Thread, listing, read_py_spy
from aelastic.diagnose.stacks.interpreter import stacks_of
from aelastic.diagnose.stacks.memory import Unreadable

# The whole collection: a kill waits for it.
TIMEOUT_S = 2.0
# Until when each source is waited for, counted from the beginning of all.  Memory takes 2 ms, py-spy 10 ms, 100 ms
# if the workers keep all CPUs busy.  The rest is for the disk.
MEMORY_UNTIL_S = 0.8
PY_SPY_UNTIL_S = 1.8
# py-spy takes some 10 MiB; running more of them than there are CPUs gains nothing.
AT_ONCE = 16
# Reading the memory of a process that runs fails now and then, when it changes meanwhile.
PY_SPY_ATTEMPTS = 3
# If a worker is not Python (a shell that starts it, say), at most this many of its processes are looked at.
DESCENDANTS_MAX = 4
# Of one process.  100 threads with 100 frames, where faulthandler stops, have 1 MiB.
OUTPUT_BYTES_MAX = 1 << 20
WORDS_CHARS_MAX = 200

MEMORY, PY_SPY = "memory", "py-spy"


class Stack(Record):
    """The stack of a process."""

    source: str
    threads: tuple[Thread, ...]  # the main one first
    text: str  # all of it


class NotSeen(Exception):
    """A source returns no stack; the message gives the reason."""


class Tools(Record):
    """What the sources need of this machine."""

    py_spy: str | None  # the program
    env: Mapping[str, str]  # of the program


def find_py_spy(path: str | None) -> str | None:
    """Returns the program: the one in the user's PATH, or else the one that was installed with this Python."""
    return shutil.which("py-spy", path=path or os.defpath) or shutil.which(
        "py-spy", path=os.path.dirname(sys.executable)
    )


async def take(targets: Mapping[int, int], tools: Tools, found: dict[int, Stack | str]) -> None:
    """Takes the stacks of processes, in `PY_SPY_UNTIL_S` at most.

    Args:
        targets: the processes, by local rank.
        tools: what to ask with.
        found: takes the answers as they come, by local rank: a stack, or why not.
    """
    begun = clock.now()
    turns = anyio.CapacityLimiter(AT_ONCE)

    async def look(local_rank: int, pid: int) -> None:
        found[local_rank] = await _look(pid, tools, turns, begun)

    async with anyio.create_task_group() as tasks:
        for local_rank, pid in targets.items():
            tasks.start_soon(look, local_rank, pid, name=f"stack of {local_rank}")


async def _look(pid: int, tools: Tools, turns: anyio.CapacityLimiter, begun: float) -> Stack | str:
    reasons = []
    sources: Sequence[tuple[str, Callable[[int], Awaitable[Stack]], float]] = (
        (MEMORY, partial(_read_memory, turns=turns), MEMORY_UNTIL_S),
        (PY_SPY, partial(_dump, tools=tools, turns=turns), PY_SPY_UNTIL_S),
    )
    for name, ask, until_s in sources:
        reason = "no answer in time"
        with anyio.CancelScope(deadline=begun + until_s):
            try:
                return await _ask_each(pid, ask)
            except (NotSeen, OSError) as error:
                reason = str(error)
        if not proc_table.is_alive(pid):
            return "it has ended"
        reasons.append(f"{name}: {reason}")
    return "; ".join(reasons)


async def _ask_each(pid: int, ask: Callable[[int], Awaitable[Stack]]) -> Stack:
    """Asks for the stack of a process; if it has none, of those it has started: it may be a shell."""
    try:
        return await ask(pid)
    except NotSeen as error:
        started = [entry.pid for entry in proc_table.session_members({pid}) if entry.pid != pid]
        for each in started[:DESCENDANTS_MAX]:
            with suppress(NotSeen):
                return await ask(each)
        raise error from None


# Memory.


async def _read_memory(pid: int, turns: anyio.CapacityLimiter) -> Stack:
    try:
        # In a thread: reading a process that waits for a disk may block.
        threads = await run_sync(stacks_of, pid, abandon_on_cancel=True, limiter=turns)
    except Unreadable as error:
        raise NotSeen(str(error)) from None
    return Stack(MEMORY, threads, listing(threads))


# py-spy.


async def _dump(pid: int, tools: Tools, turns: anyio.CapacityLimiter) -> Stack:
    if tools.py_spy is None:
        raise NotSeen("not installed (pip install py-spy)")
    complaint = ""
    for _ in range(PY_SPY_ATTEMPTS):
        # Nonblocking: it does not stop the process, and sees one that is stopped already.
        command = [tools.py_spy, "dump", "--nonblocking", "--json", "--pid", str(pid)]
        try:
            async with turns:
                code, output, complaint = await output_of(command, tools.env, bytes_max=OUTPUT_BYTES_MAX)
        except ProgramError as error:
            raise NotSeen(str(error)) from None
        if code == 0:
            try:
                threads = read_py_spy(output, pid)
            except ValueError as error:
                complaint = f"cannot read its output ({error})"
            else:
                if any(thread.frames for thread in threads):
                    return Stack(PY_SPY, threads, listing(threads))
                complaint = "no Python frame was found"
        elif "ermission" in complaint:
            break  # asking again does not help
    raise NotSeen(_words(complaint) or "it gives no reason")


def _words(complaint: str) -> str:
    """Returns the first line and the innermost cause of py-spy's complaint, without its own stack."""
    lines = [line.strip() for line in complaint.partition("Stack backtrace:")[0].splitlines() if line.strip()]
    first = [line for line in lines if not line.startswith("Caused by")][:1]
    refused = next((line for line in lines if line.startswith("Permission Denied")), "")
    words = "; ".join(dict.fromkeys(filter(None, [*first, refused])))
    if "ermission" in complaint:
        words = "permission denied (it needs root, CAP_SYS_PTRACE, or kernel.yama.ptrace_scope=0)"
    return words.removeprefix("Error: ")[:WORDS_CHARS_MAX]
