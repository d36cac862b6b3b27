"""Gives sets of tasks and cancel scopes, which anyio iterates when it cancels, the same order in each run.

By default the order of such a set depends on memory addresses.  Connections were closed in that order, so a seed could
produce another story the next time.
"""

from __future__ import annotations

import itertools
from asyncio import Task
from typing import Any

from anyio._backends import _asyncio as backend

_numbers = itertools.count()


def begin() -> None:
    """Begins a world: numbers start at 0, and all cancel scopes of this process are numbered from now on."""
    global _numbers  # noqa: PLW0603  anyio makes scopes by itself
    _numbers = itertools.count()
    backend.CancelScope = NumberedScope  # type: ignore[misc]


class _Numbered:
    """Hashes by the order of creation."""

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
