"""Finds out how this Python's interpreter stores threads and frames, by looking for known ones in its own memory.

Workers mostly run the very program that the agent runs, so what holds here holds there, and no table of versions is
needed: two threads of our own stand still, their states, frames and code are known, and we look for the offsets at
which one points to the other.  The result is tried on this process before it is used on another; a Python that stores
these things differently is reported as unknown, never guessed at.

Names of the parts are CPython's: `_PyRuntime`, `PyInterpreterState`, `PyThreadState`, `_PyInterpreterFrame`,
`PyCodeObject`.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import struct
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any

from aelastic.base.record import Record
from aelastic.diagnose.stacks.memory import WORD_BYTES, Memory, Unreadable

# How far parts are looked for: the largest one, an interpreter's state, has its threads in the first 10 KiB.
_RUNTIME_BYTES = _INTERPRETER_BYTES = 1 << 14
_THREAD_BYTES = 512
_FRAME_BYTES = 96
_CODE_BYTES = 256
_HEAD_BYTES = 64
# From a frame's code to its first instruction.
_CODE_HEAD_MAX = 512
# Pointers may have marks in their lowest bits.
POINTER = ~7
# Of strings, by the bytes of a character.
ENCODINGS = {1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}


class Unknown(Exception):
    """This Python stores its threads and frames in an unknown way; the message names what is missing."""


class Layout(Record):
    """Where things are, in bytes from the beginning of what holds them."""

    image: str  # the file that holds the interpreter, as `Memory.image_at` returns it
    interpreter: int  # of the pointer to the main interpreter, from where the image is loaded
    code_type: int  # of the type of code objects, from there
    thread: int  # in the interpreter: the newest thread
    next_thread: int  # in a thread
    native_id: int
    current: tuple[int, ...]  # from a thread to its innermost frame; each but the last is a pointer on the way
    code: int  # in a frame
    previous: int
    instruction: int
    type: int  # in an object
    file: int  # in code
    name: int
    lines: int
    first_line: int
    first_instruction: int
    bytes_size: int  # in bytes
    bytes_data: int
    text_size: int  # in a string
    kind: int  # of the half word with the width of its characters, in bytes
    kind_shift: int
    ascii_bit: int
    ascii: int  # of the characters
    wide: int  # of the characters, if not all are ASCII


def find(older: StillThread, newer: StillThread) -> Layout:
    """Finds the layout of this process's interpreter.

    Args:
        older: a thread that stands still.
        newer: the one that was started next.

    Raises:
        Unknown: the layout is of an unknown kind, or a third thread was started between them.
        Unreadable: a process may not even read its own memory here.
    """
    memory = Memory(os.getpid())
    parts: dict[str, Any] = _of_frames(memory, older, newer) | _of_threads(memory, older, newer)
    data = b"abc" * 13
    parts["bytes_size"] = _first(_where(memory, id(data), _HEAD_BYTES, len(data)), "the size of bytes")
    parts["bytes_data"] = _first([memory.read(id(data), sys.getsizeof(data)).find(data)], "bytes")
    return Layout(**parts, **_of_code(memory), **_of_text(memory))


class StillThread:
    """A thread that stands still."""

    def __init__(self) -> None:
        # Locks are C's: no frame of theirs is the innermost one.
        self._is_there, self._may_go = threading.Lock(), threading.Lock()
        for lock in (self._is_there, self._may_go):
            lock.acquire()
        self._thread = threading.Thread(target=self._run, name="stands still", daemon=True)
        self._thread.start()
        self._is_there.acquire()

    def _run(self) -> None:
        self._stand()

    def _stand(self) -> None:
        self.state, self.native_id = _pointer("PyThreadState_Get"), threading.get_native_id()
        self._is_there.release()
        self._may_go.acquire()

    @property
    def frames(self) -> list[FrameType]:
        """Returns its frames, innermost first."""
        found = list[FrameType]()
        frame: FrameType | None = sys._current_frames()[self._thread.ident or 0]  # noqa: SLF001  its only name
        while frame is not None:
            found.append(frame)
            frame = frame.f_back
        return found

    def go(self) -> None:
        """Ends it."""
        self._may_go.release()
        self._thread.join()


@contextmanager
def two_threads() -> Iterator[tuple[StillThread, StillThread]]:
    """Two threads that stand still, the older one first."""
    older = StillThread()
    try:
        newer = StillThread()
        try:
            yield older, newer
        finally:
            newer.go()
    finally:
        older.go()


@cache
def _python() -> ctypes.PyDLL:
    return ctypes.PyDLL(None)


def _pointer(function: str) -> int:
    get = getattr(_python(), function)
    get.restype = ctypes.c_void_p
    return int(get())


def _where(memory: Memory, begin: int, size: int, value: int, mask: int = -1) -> list[int]:
    """Returns the offsets at which a word has a value; memory may end before the size."""
    found = list[int]()
    for page in range(0, size, min(size, 512)):
        try:
            words = memory.words(begin + page, min(size, 512) // WORD_BYTES)
        except Unreadable:
            break
        found += [page + at * WORD_BYTES for at, word in enumerate(words) if word & mask == value]
    return found


def _first(found: Sequence[int], what: str) -> int:
    if not found:
        raise Unknown(f"{what} is not found")
    return found[0]


def _common(found: Sequence[Sequence[int]], what: str) -> int:
    return _first([at for at in found[0] if all(at in each for each in found)], what)


def _of_threads(memory: Memory, older: StillThread, newer: StillThread) -> dict[str, Any]:
    runtime = ctypes.addressof(ctypes.c_char.in_dll(_python(), "_PyRuntime"))
    interpreter = _pointer("PyInterpreterState_Get")
    image, base = memory.image_at(runtime)
    # The list of interpreters begins with the newest, and the main one follows: here it is both.
    pointers = _where(memory, runtime, _RUNTIME_BYTES, interpreter)
    main = _first(pointers[1:] or pointers, "the main interpreter")
    both = (older, newer)
    return {
        "image": image,
        "interpreter": runtime + main - base,
        "code_type": id(CodeType) - base,
        "type": _first(_where(memory, id(find.__code__), _HEAD_BYTES, id(CodeType)), "an object's type"),
        "thread": _first(_where(memory, interpreter, _INTERPRETER_BYTES, newer.state), "the newest thread"),
        "next_thread": _first(_where(memory, newer.state, _HEAD_BYTES, older.state), "the next thread"),
        "native_id": _common(
            [_where(memory, each.state, _THREAD_BYTES, each.native_id) for each in both], "a thread's number"
        ),
    }


def _of_frames(memory: Memory, older: StillThread, newer: StillThread) -> dict[str, Any]:
    """Frames of the interpreter are not Python's objects, which point to them."""
    frames = newer.frames
    codes = [id(frame.f_code) for frame in frames]
    for at in range(2 * WORD_BYTES, _HEAD_BYTES, WORD_BYTES):
        own = [memory.word(id(frame) + at) for frame in frames]
        code_at = [_where(memory, frame, _FRAME_BYTES, code, POINTER) for frame, code in zip(own, codes, strict=True)]
        # Further out, calls from C may come between.
        previous_at = _where(memory, own[0], _FRAME_BYTES, own[1])
        if all(code_at) and previous_at:
            break
    else:
        raise Unknown("a frame's code is not found")
    # The instruction that each frame is at is as far from its code's first as Python says.
    heads = [
        {
            offset: word - code - frame.f_lasti
            for offset, word in enumerate(memory.words(address, _FRAME_BYTES // WORD_BYTES))
            if 0 < word - code - frame.f_lasti < _CODE_HEAD_MAX
        }
        for address, code, frame in zip(own, codes, frames, strict=True)
    ]
    both = set(heads[0].items()).intersection(*(each.items() for each in heads[1:]))
    if not both:
        raise Unknown("a frame's instruction is not found")
    instruction, first_instruction = min(both)
    top_of_older = memory.word(id(older.frames[0]) + at)
    ways = set(_ways(memory, newer.state, own[0])) & set(_ways(memory, older.state, top_of_older))
    if not ways:
        raise Unknown("a thread's frame is not found")
    return {
        "current": min(ways, key=lambda way: (len(way), way)),
        "code": _common(code_at, "a frame's code"),
        "previous": previous_at[0],
        "instruction": instruction * WORD_BYTES,
        "first_instruction": first_instruction,
    }


def _ways(memory: Memory, state: int, frame: int) -> Iterator[tuple[int, ...]]:
    """Yields ways from a thread to its innermost frame: directly, or through the evaluation in C that it is in."""
    yield from ((at,) for at in _where(memory, state, _THREAD_BYTES, frame))
    for at, word in enumerate(memory.words(state, _THREAD_BYTES // WORD_BYTES)):
        if word >= 1 << 16 and not word & ~POINTER:
            yield from ((at * WORD_BYTES, further) for further in _where(memory, word, 4 * WORD_BYTES, frame))


def _of_code(memory: Memory) -> dict[str, Any]:
    first_line, file = 54_321, "/a file/that is/nowhere"
    (outer,) = (
        each
        for each in compile("\n" * (first_line - 2) + "class A:\n def of_a(self): self", file, "exec").co_consts
        if isinstance(each, CodeType)
    )
    (code,) = (each for each in outer.co_consts if isinstance(each, CodeType))
    numbers = struct.unpack(f"={_CODE_BYTES // 4}I", memory.read(id(code), _CODE_BYTES))
    parts: dict[str, Any] = {
        name: _first(_where(memory, id(code), _CODE_BYTES, id(value)), f"a code's {name}")
        for name, value in (("file", code.co_filename), ("name", code.co_name), ("lines", code.co_linetable))
    }
    return parts | {
        "first_line": 4 * _first([at for at, number in enumerate(numbers) if number == first_line], "its line")
    }


def _of_text(memory: Memory) -> dict[str, Any]:
    # Made here, so that they differ only in the width of their characters; unused bits have any value.
    samples = [
        ("".join([first, *"bcdefghijklmnopqrstuvwxyz"]), width)
        for first, width in zip("aäα𝛼", (1, 1, 2, 4), strict=True)
    ]
    heads = [struct.unpack("=12I", memory.read(id(text), 6 * WORD_BYTES)) for text, _ in samples]
    size = _common([_where(memory, id(text), 6 * WORD_BYTES, len(text)) for text, _ in samples], "a string's size")
    for at, shift in itertools.product(range(12), range(28)):
        bits = [head[at] >> shift for head in heads]
        if [each & 7 for each in bits] == [width for _, width in samples]:
            break
    else:
        raise Unknown("a string's kind is not found")
    is_ascii = _first(
        [bit for bit in range(3, 8) if [each >> bit & 1 for each in bits] == [1, 0, 0, 0]], "an ASCII string"
    )
    data = [memory.read(id(text), sys.getsizeof(text)).find(text.encode(ENCODINGS[width])) for text, width in samples]
    return {
        "text_size": size,
        "kind": 4 * at,
        "kind_shift": shift,
        "ascii_bit": shift + is_ascii,
        "ascii": data[0],
        "wide": data[1],
    }
