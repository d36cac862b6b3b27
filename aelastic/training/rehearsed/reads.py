"""Reads of RANK and WORLD_SIZE before the decorated function is called: a survivor would keep the old values.

Only what the script itself reads counts, and only after it has imported `in_place`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from aelastic.training.rehearsed import notes

_NAMES = {"RANK", "WORLD_SIZE"}
_get_item: Callable[[Any, Any], Any] | None = None


def watch() -> None:
    """Notes reads from now on."""
    global _get_item  # noqa: PLW0603  one environment a process
    if _get_item is not None:
        return
    get_item = _get_item = os._Environ.__getitem__  # noqa: SLF001  the only way to notice them

    def noting(environ: Any, name: Any) -> Any:
        if name in _NAMES:
            _note(name)
        return get_item(environ, name)

    os._Environ.__getitem__ = noting  # type: ignore[method-assign]  # noqa: SLF001


def stop() -> None:
    """Stops noting them: the function is called."""
    global _get_item  # noqa: PLW0603
    if _get_item is not None:
        os._Environ.__getitem__ = _get_item  # type: ignore[method-assign]  # noqa: SLF001
        _get_item = None


def _note(name: str) -> None:
    place, is_script = notes.place_in_script()
    if is_script:
        notes.note(notes.HABIT, habit=notes.READ_OUTSIDE, where=place, what=name, round=0, rank=-1)
