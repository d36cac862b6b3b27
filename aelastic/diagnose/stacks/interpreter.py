"""Takes the Python stacks of a process from outside: from its memory, while it runs.

The process need not help: neither hold the GIL nor even run.  Memory may change while it is read: parts that do not
fit are read again, and reported as unreadable after `ATTEMPTS`.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

from aelastic.diagnose.stacks.format import Frame, Thread
from aelastic.diagnose.stacks.layout import ENCODINGS, POINTER, Layout, Unknown, find, two_threads
from aelastic.diagnose.stacks.memory import WORD_BYTES, Memory, Unreadable

ATTEMPTS = 10
# A process may have written anything there: at most this many are read, which takes 0.3 s.
THREADS_MAX = 128
FRAMES_MAX = 256
TEXT_CHARS_MAX = 1 << 12
LINES_BYTES_MAX = 1 << 18
# The file of frames with which Python 3.12 enters its interpreter from C.
_SHIM = "<shim>"

_looks = threading.Lock()
_STATES = {"R": "runs", "S": "sleeps", "D": "waits for a disk", "T": "is stopped", "t": "is stopped by a debugger"}


def stacks_of(pid: int) -> tuple[Thread, ...]:
    """Returns the threads of a process that runs the Python of this one, the main one first.

    Raises:
        Unreadable: it runs another Python, or may not be read; the message tells them apart.
    """
    with _looks:  # two at once would start each other's threads between the two that are looked for
        found = _layout()
    memory = Memory(pid)
    base = memory.base_of(found.image)
    if not base:
        raise Unreadable("it runs another Python than the agent, or none")
    return _Reader(memory, found, base).threads()


@cache
def _layout() -> Layout:
    """Returns the layout of this Python, tried on this process."""
    reason = ""
    for _ in range(ATTEMPTS):
        with two_threads() as (older, newer):
            try:
                found, memory = find(older, newer), Memory(os.getpid())
                seen = _Reader(memory, found, memory.base_of(found.image)).stack(newer.state)
            except Unknown as error:
                reason = f"{error}"
                continue
            if [(each.file, each.line, each.function) for each in seen] == [
                (each.f_code.co_filename, each.f_lineno, each.f_code.co_name) for each in newer.frames
            ]:
                return found
            reason = "they are not as Python describes them"
    raise Unreadable(f"this Python keeps its frames in a way that is not known ({reason})")


class _Reader:
    def __init__(self, memory: Memory, layout: Layout, base: int) -> None:
        self._memory, self._layout, self._base = memory, layout, base
        self._codes = dict[int, tuple[str, str, bytes, int]]()
        parts = (layout.code, layout.previous, layout.instruction)
        self._frame_bytes = max(parts) + WORD_BYTES

    def threads(self) -> tuple[Thread, ...]:
        memory, layout = self._memory, self._layout
        interpreter = memory.word(self._base + layout.interpreter)
        if not interpreter:
            raise Unreadable("its Python has not begun, or has ended")
        found = list[Thread]()
        state = memory.word(interpreter + layout.thread)
        while state and len(found) < THREADS_MAX:
            tid = memory.word(state + layout.native_id)
            name, letter = self._seen_by_kernel(tid)
            if letter:  # else it has ended, or has not begun
                is_main = tid == memory.pid
                frames = self.stack(state)
                found.append(Thread("MainThread" if is_main else name, frames, is_main, _STATES.get(letter, "")))
            state = memory.word(state + layout.next_thread)
        if not any(thread.frames for thread in found):
            raise Unreadable("no Python frame was found")
        return tuple(sorted(found, key=lambda thread: not thread.is_main))

    def stack(self, state: int) -> tuple[Frame, ...]:
        """Returns the frames of a thread; none if they change too fast."""
        outermost: tuple[str, str] | None = None
        for _ in range(ATTEMPTS):
            with suppress(Unreadable):
                address = state
                for offset in self._layout.current:
                    address = self._memory.word(address + offset)
                frames = tuple(self._frames(address))
                # If a call returned meanwhile, frames end too early: mostly not at the same one twice.
                before, outermost = outermost, (frames[-1].file, frames[-1].function) if frames else ("", "")
                if before == outermost:
                    return frames
        return ()

    def _seen_by_kernel(self, tid: int) -> tuple[str, str]:
        """Returns a thread's name, and its state."""
        try:
            with open(f"/proc/{self._memory.pid}/task/{tid}/stat", errors="replace") as file:
                name, _, rest = file.read().rpartition(") ")
        except OSError:
            return "", ""
        return name.partition("(")[2], rest[:1]

    def _frames(self, address: int) -> Iterator[Frame]:
        layout = self._layout
        for _ in range(FRAMES_MAX):
            if not address:
                return
            head = self._memory.read(address, self._frame_bytes)
            code, previous, instruction = (
                struct.unpack_from("=Q", head, at)[0] for at in (layout.code, layout.previous, layout.instruction)
            )
            code &= POINTER
            if code and self._memory.word(code + layout.type) == self._base + layout.code_type:  # else a call from C
                file, name, lines, first = self._code(code)
                line = line_at(lines, first, instruction - code - layout.first_instruction)
                if file != _SHIM:
                    yield Frame(file, line, name)
            address = previous

    def _code(self, address: int) -> tuple[str, str, bytes, int]:
        """Returns its file, name, table of lines, and first line."""
        if address not in self._codes:
            memory, layout = self._memory, self._layout
            file, name, lines = (memory.word(address + at) for at in (layout.file, layout.name, layout.lines))
            (first,) = struct.unpack("=i", memory.read(address + layout.first_line, 4))
            size = memory.word(lines + layout.bytes_size)
            if size > LINES_BYTES_MAX:
                raise Unreadable("its memory changes too fast")
            table = memory.read(lines + layout.bytes_data, size)
            self._codes[address] = self._text(file), self._text(name), table, first
        return self._codes[address]

    def _text(self, address: int) -> str:
        memory, layout = self._memory, self._layout
        size = memory.word(address + layout.text_size)
        (bits,) = struct.unpack("=I", memory.read(address + layout.kind, 4))
        width = bits >> layout.kind_shift & 7
        if width not in ENCODINGS or size > TEXT_CHARS_MAX:
            raise Unreadable("its memory changes too fast")
        begin = layout.ascii if bits >> layout.ascii_bit & 1 else layout.wide
        return memory.read(address + begin, size * width).decode(ENCODINGS[width], "replace")


def line_at(table: bytes, first: int, instruction: int) -> int:
    """Returns the line of an instruction, which is given in bytes from the first; 0 if it has none.

    The table is that of Python 3.11 and later: `Objects/locations.md` of CPython (before 3.13 `locations.md`).
    """
    line, end, at = first, 0, 0
    while at < len(table):
        kind, units = table[at] >> 3 & 15, (table[at] & 7) + 1
        at += 1
        if kind in {13, 14}:
            delta, at = _signed(table, at)
            line += delta
        elif kind in {11, 12}:
            line += kind - 10
        while at < len(table) and not table[at] & 0x80:  # its columns
            at += 1
        end += 2 * units
        if instruction < end:
            return 0 if kind == 15 else line
    return 0


def _signed(table: bytes, at: int) -> tuple[int, int]:
    """Returns a number of six bits a byte, lowest first, its sign in the lowest bit of all; and where it ends."""
    value = shift = 0
    while at < len(table):
        byte = table[at]
        at += 1
        value |= (byte & 63) << shift
        shift += 6
        if not byte & 64:
            break
    return (-(value >> 1) if value & 1 else value >> 1), at
