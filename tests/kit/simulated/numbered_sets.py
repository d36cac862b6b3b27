"""Sets of tasks and of cancel scopes, which anyio iterates when it cancels, in the same order each time.

By default the order of such a set depends on memory addresses.  Connections were closed in that order, so that a seed could
tell another story the next time.
"""

from __future__ import annotations

import itertools
from asyncio import Task
from typing import Any

from anyio._backends import _asyncio as backend

_numbers = itertools.count()


def begin() -> None:
    """A world begins: numbers start at 0, and all cancel scopes of this process are numbered from now on."""
    global _numbers  # noqa: PLW0603  anyio makes scopes by itself
    _numbers = itertools.count()
    backend.CancelScope = NumberedScope  # type: ignore[misc]


class _Numbered:
    """Found in a set by when it was made."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._number = next(_numbers)
        super().__init__(*args, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class NumberedTask(_Numbered, Task[Any]):
    """A task with a number."""


class NumberedScope(_Numbered, backend.CancelScope):
    """A cancel scope with a number."""
