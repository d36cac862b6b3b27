"""Reads the output of py-spy, and formats stacks for files and reports.

Pure; nothing here raises but `ValueError`, for text that is not a stack.  Frames come innermost first.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aelastic.base.record import Record

# Frames quoted of a stack that is kept in a file: from a wait in a library to the caller's code it is a few frames.
FRAMES_QUOTED = 10
# Frames quoted if no file remains: the stack of most training loops is not deeper.
FRAMES_QUOTED_ALONE = 40
# Frames of each thread besides the main one, and how many threads: pin-memory, autograd and NCCL's among them.
FRAMES_OF_OTHERS = 4
OTHERS_QUOTED = 8
# A file's path or a function's name; paths have 4,096 bytes at most, most have a hundred.
NAME_CHARS_MAX = 300


class Frame(Record):
    """One call: a place in the code."""

    file: str
    line: int  # 0: not known
    function: str

    def __str__(self) -> str:
        line = f", line {self.line}" if self.line else ""
        return f'File "{_short(self.file)}"{line}, in {_short(self.function)}'


class Thread(Record):
    """One thread of a process."""

    name: str
    frames: tuple[Frame, ...]  # innermost first
    is_main: bool = False
    state: str = ""  # as in "runs, has the GIL"; "": not known


def read_py_spy(text: str, pid: int) -> tuple[Thread, ...]:
    """Returns the threads in the output of `py-spy dump --json`, the main one first.

    Raises:
        ValueError: it is something else.
    """
    dump = json.loads(text)
    if not isinstance(dump, list) or not dump:
        raise ValueError("no threads are in it")
    try:
        threads = [_thread_of(each, pid) for each in dump]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not as expected: {error!r}") from None
    return tuple(sorted(threads, key=lambda thread: not thread.is_main))


def _thread_of(thread: Mapping[str, Any], pid: int) -> Thread:
    frames = tuple(Frame(str(each["filename"]), int(each["line"]), str(each["name"])) for each in thread["frames"])
    state = "runs" if thread.get("active") else "waits"
    name = str(thread.get("thread_name") or f"thread {thread.get('os_thread_id') or thread.get('thread_id')}")
    is_main = thread.get("os_thread_id") == pid or (thread.get("os_thread_id") is None and name == "MainThread")
    return Thread(name, frames, is_main, f"{state}, has the GIL" if thread.get("owns_gil") else state)


def listing(threads: Sequence[Thread]) -> str:
    """Returns whole stacks, for a file."""
    return "\n".join(line for thread in threads for line in (*_lines(thread), ""))


def place(threads: Sequence[Thread]) -> str:
    """Returns the innermost frame of the main thread, in one line."""
    return str(threads[0].frames[0]) if threads and threads[0].frames else ""


def quote(threads: Sequence[Thread], *, is_kept: bool) -> str:
    """Returns the lines of a stack that a report shows.

    Args:
        threads: the main one first.
        is_kept: the whole stack is kept in a file.
    """
    main, others = threads[0], threads[1:]
    lines = list(_frame_lines(main, FRAMES_QUOTED if is_kept else FRAMES_QUOTED_ALONE))
    if is_kept:
        return "\n".join(lines)
    for thread in others[:OTHERS_QUOTED]:
        lines += _lines(thread, FRAMES_OF_OTHERS)
    if len(others) > OTHERS_QUOTED:
        lines.append(f"... and {len(others) - OTHERS_QUOTED} more threads")
    return "\n".join(lines)


def _lines(thread: Thread, frames_max: int | None = None) -> Iterator[str]:
    yield f"{_short(thread.name)}{f' ({thread.state})' if thread.state else ''}, most recent call first:"
    yield from _frame_lines(thread, frames_max)


def _frame_lines(thread: Thread, frames_max: int | None) -> Iterator[str]:
    shown = thread.frames[:frames_max]
    yield from (f"  {frame}" for frame in shown)
    if more := len(thread.frames) - len(shown):
        yield f"  ... and {more} more {'frames' if more > 1 else 'frame'}"
    if not thread.frames:
        yield "  no Python frame"


def _short(name: str) -> str:
    """Returns a name from the worker, safe for a terminal: one line of bounded length; only its end if it is cut."""
    text = "".join(each if each.isprintable() else "?" for each in name)
    return text if len(text) <= NAME_CHARS_MAX else f"...{text[-NAME_CHARS_MAX:]}"
