"""Error files as `record` writes them, and the calls that its handler gets."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from aelastic.errors import ErrorHandler

TRACEBACK = (
    'Traceback (most recent call last):\n  File "train.py", line 12, in main\n    step()\nValueError: batch is empty\n'
)


def written(path: Path) -> Any:
    return json.loads(path.read_text())


def record_text(
    message: str = "ValueError: batch is empty", traceback: str = TRACEBACK, timestamp: str = "1000"
) -> str:
    return json.dumps(
        {"message": {"message": message, "extraInfo": {"py_callstack": traceback, "timestamp": timestamp}}}
    )


class Recorded(ErrorHandler):
    """A handler that records the calls of `record`, as a handler of torch 2.15 may."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def initialize(self) -> None:
        self.calls.append(("initialize", self._fn_name))

    def record_exception(self, e: BaseException) -> None:
        self.calls.append(("record_exception", self._fn_name))

    def record_success(self) -> None:
        self.calls.append(("record_success", self._fn_name))


def returns() -> int:
    return 7


def raises() -> int:
    raise ValueError("x")


def exits() -> int:
    sys.exit(0)


# Functions decorated with `record`, and the calls that its handler gets.
HOOKS: dict[str, tuple[Callable[[], int], list[object]]] = {
    "returns": (returns, [("initialize", "returns"), ("record_success", "returns")]),
    "raises": (raises, [("initialize", "raises"), ("record_exception", "raises")]),
    "exits with 0": (exits, [("initialize", "exits")]),
    "has no name": (functools.partial(returns), [("initialize", None), ("record_success", None)]),
}


def outcome(main: Callable[[], int | None]) -> object:
    try:
        return main()
    except ValueError as error:
        return str(error)
