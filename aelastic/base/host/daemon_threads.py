"""Calls that may never return, in threads for which neither an event loop nor the interpreter's end waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def begin(function: Callable[[], T], name: str) -> Future[T]:
    """Calls a function in a daemon thread; returns the future of its result, not cancelled if a caller gives up.

    Args:
        function: what to call.
        name: the name of the thread.

    Raises:
        RuntimeError: the host refuses another thread.
    """
    answer: Future[T] = Future()
    answer.set_running_or_notify_cancel()

    def body() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:  # noqa: BLE001  the caller gets it
            answer.set_exception(error)

    threading.Thread(target=body, name=name, daemon=True).start()
    return answer
