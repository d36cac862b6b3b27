"""Stacks read from a process's memory: from this one's, compared with what Python reports."""

from __future__ import annotations

import ast
import os
import threading
import types
from collections.abc import Callable, Iterator

import pytest

from aelastic.diagnose.stacks import interpreter
from aelastic.diagnose.stacks.format import Thread
from aelastic.diagnose.stacks.interpreter import line_at, stacks_of
from aelastic.diagnose.stacks.layout import Unknown, find
from aelastic.diagnose.stacks.memory import Memory, Unreadable


def codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from codes_of(each)


@pytest.mark.parametrize(
    "module", [threading, types, *(pytest.param(each, marks=pytest.mark.all) for each in (ast, os))]
)
def test_the_line_of_each_instruction_is_the_one_that_python_tells(module: types.ModuleType) -> None:
    assert module.__file__ is not None
    with open(module.__file__) as file:
        outer = compile(file.read(), module.__file__, "exec")
    seen = 0
    for code in codes_of(outer):
        for begin, end, line in code.co_lines():
            for at in range(begin, end, 2):
                assert line_at(code.co_linetable, code.co_firstlineno, at) == (line or 0)
                seen += 1
    assert seen > 1000


@pytest.mark.parametrize("table", [b"", b"\x80", b"\xff", b"\xf0\x7f\x7f", b"\xe8" + b"\x7f" * 50, bytes(range(256))])
def test_no_table_of_lines_is_too_broken_to_be_read(table: bytes) -> None:
    assert line_at(table, 1, 1 << 20) == 0


def thread_that(stands: Callable[[threading.Lock], None]) -> Thread:
    lock = threading.Lock()
    lock.acquire()
    thread = threading.Thread(target=stands, args=(lock,))
    thread.start()
    try:
        while True:
            for each in stacks_of(os.getpid()):
                if each.state == "sleeps" and any(frame.function == stands.__name__ for frame in each.frames):
                    return each
    finally:
        lock.release()
        thread.join()


def test_frames_have_their_names_files_and_lines_whatever_the_alphabet() -> None:
    scope: dict[str, Callable[[threading.Lock], None]] = {}
    for name in ("plain", "größe", "поток", "𝔻𝕖𝕖𝕡"):
        code = f"def {name}(lock):\n    class A:\n\n        x = lock.acquire()\n"
        exec(compile(code, f"/tmp/{name}.py", "exec"), scope)
    for stands in [each for name, each in scope.items() if not name.startswith("__")]:
        thread = thread_that(stands)
        name = stands.__name__
        assert [(frame.function, frame.line) for frame in thread.frames[:2]] == [("A", 4), (name, 2)]
        assert thread.frames[1].file == stands.__code__.co_filename
        assert (thread.frames[-1].function, thread.is_main, thread.state) == ("_bootstrap", False, "sleeps")


def test_of_a_deep_recursion_the_innermost_frames_are_read() -> None:
    def deep(lock: threading.Lock, left: int = 800) -> None:
        if left:
            deep(lock, left - 1)
        else:
            lock.acquire()

    thread = thread_that(deep)
    assert {frame.function for frame in thread.frames} == {"deep"}
    assert len(thread.frames) == interpreter.FRAMES_MAX


def test_a_process_that_is_gone_is_not_read() -> None:
    with pytest.raises(Unreadable, match=r"cannot read what it has loaded \(No such file or directory\)"):
        stacks_of(1 << 22)


def test_memory_that_is_not_there_is_refused() -> None:
    memory = Memory(os.getpid())
    with pytest.raises(Unreadable, match=r"cannot read its memory \(Bad address\)"):
        memory.read(8, 8)
    text = b"to be read" * 10
    assert memory.read(id(text), 200).count(b"to be read") == 10


def test_a_python_that_keeps_its_frames_otherwise_is_reported_as_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(*_: object) -> None:
        raise Unknown("a frame's code is not found")

    interpreter._layout.cache_clear()
    monkeypatch.setattr(interpreter, "find", find_nothing)
    try:
        with pytest.raises(Unreadable, match=r"in a way that is not known \(a frame's code is not found\)"):
            stacks_of(os.getpid())
    finally:
        interpreter._layout.cache_clear()


def test_a_layout_that_gives_other_frames_than_python_tells_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    interpreter._layout.cache_clear()
    monkeypatch.setattr(interpreter, "find", lambda *threads: find(*threads).replace(first_instruction=0))
    try:
        with pytest.raises(Unreadable, match="not as Python describes them"):
            stacks_of(os.getpid())
    finally:
        interpreter._layout.cache_clear()
