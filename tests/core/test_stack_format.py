"""Stacks in py-spy's format, and as reports quote them."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.diagnose.stacks.format import (
    FRAMES_QUOTED,
    FRAMES_QUOTED_ALONE,
    Frame,
    Thread,
    listing,
    place,
    quote,
    read_py_spy,
)
from aelastic.errors import ChildFailedError, ProcessFailure


def dump_of_py_spy(*threads: dict[str, Any]) -> str:
    usual = {"pid": 7, "active": False, "owns_gil": False, "os_thread_id": 8, "thread_id": 99, "frames": []}
    return json.dumps([{**usual, **thread} for thread in threads])


def frame(name: str, line: int, file: str = "/job/train.py") -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line, "module": None}


def test_py_spys_main_thread_comes_first_innermost_frame_first() -> None:
    text = dump_of_py_spy(
        {"thread_name": "loader", "frames": [frame("get", 3)]},
        {
            "os_thread_id": 7,
            "thread_name": None,
            "active": True,
            "owns_gil": True,
            "frames": [frame("f", 1), frame("g", 2)],
        },
    )

    main, loader = read_py_spy(text, 7)

    assert main.is_main and main.frames == (Frame("/job/train.py", 1, "f"), Frame("/job/train.py", 2, "g"))
    assert (main.state, loader.name, loader.state, loader.is_main) == ("runs, has the GIL", "loader", "waits", False)


@pytest.mark.parametrize("text", ["", "{}", "[]", "[1]", '[{"frames": 3}]', '[{"frames": [{"name": "f"}]}]', "[" * 50])
def test_what_is_not_a_stack_is_refused_in_one_way(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_py_spy(text, 7)


@given(st.text(alphabet='[]{}":,0a\n frames name'))
def test_no_text_makes_reading_raise_anything_else(text: str) -> None:
    with suppress(ValueError):
        read_py_spy(text, 7)


def deep(frames: int, name: str = "MainThread", *, is_main: bool = True) -> Thread:
    return Thread(name, tuple(Frame("/job/train.py", at, f"f{at}") for at in range(frames)), is_main, "waits")


def test_of_a_stack_in_a_file_the_innermost_frames_of_the_main_thread_are_quoted() -> None:
    lines = quote([deep(25), deep(3, "loader", is_main=False)], is_kept=True).split("\n")

    assert lines[0] == '  File "/job/train.py", in f0'
    assert len(lines) == FRAMES_QUOTED + 1 and lines[-1] == "  ... and 15 more frames"


def test_of_a_stack_in_no_file_more_is_quoted_of_every_thread() -> None:
    text = quote([deep(25), *(deep(9, f"t{at}", is_main=False) for at in range(20))], is_kept=False)

    assert all(f" in f{at}\n" in text for at in range(25))
    assert "t0 (waits), most recent call first:" in text
    assert text.endswith("... and 12 more threads")
    assert len(text.split("\n")) <= FRAMES_QUOTED_ALONE + 60


def test_what_a_worker_calls_its_functions_can_not_draw_on_a_terminal() -> None:
    evil = Thread("a\x1b[2Jb", (Frame("/x\n" + "y" * 9000, 1, "f\r"),), True)

    text = listing([evil]) + quote([evil], is_kept=True) + place([evil])

    assert all(each.isprintable() for each in text.split("\n"))
    assert len(text) < 2000


def test_ranks_that_stood_in_the_same_place_are_reported_once_and_few_places_are() -> None:
    def at(place: str, rank: int) -> str:
        return f"was killed; stack by py-spy:\n  in {place}\nall threads: /logs/{rank}/stack.txt"

    stacks_of = {
        **{rank: at("all_reduce", rank) for rank in range(7)},
        **{rank: at(f"f{rank}", rank) for rank in range(7, 14)},
    }
    failures = {14: ProcessFailure(0, 1, 1, "")}

    text = str(ChildFailedError("job", failures, range(14), stacks_of))

    assert "  ranks 0-6 was killed; stack by py-spy:\n    in all_reduce\n" in text
    assert "    all threads: /logs/0/stack.txt and beside it\n" in text
    assert text.count("in all_reduce") == 1
    assert "in f9\n" in text and "in f10\n" not in text
    assert "  ... and ranks 10-13\n" in text


def stuck(rank: int, stack: str) -> ProcessFailure:
    return ProcessFailure(rank, 2, -9, "", rank=rank, unhealthy="no sign of life", stack=stack)


def test_a_failure_besides_the_cause_has_its_stack_line_by_line() -> None:
    text = str(
        ChildFailedError("job", {0: stuck(0, "stands:\n  in f\n  in g"), 1: stuck(1, "stands:\n  in f\n  in h")})
    )
    assert "  stack     : stands:\n    in f\n    in g\n" in text
    assert "  stack     : stands:\n    in f\n    in h\n" in text


def test_ranks_that_hang_in_the_same_place_are_reported_once() -> None:
    text = str(ChildFailedError("job", {rank: stuck(rank, f"in f\nall threads: /{rank}") for rank in range(4)}))
    assert text.count("in f") == 1
    assert "\nAlso failed: ranks 1-3: no sign of life (the same stack)\n" in text


def test_of_ranks_whose_stacks_are_not_known_none_is_the_same() -> None:
    text = str(ChildFailedError("job", {rank: stuck(rank, "not known (py-spy: not installed)") for rank in range(4)}))
    assert "\nAlso failed: ranks 1-3: no sign of life\n" in text
