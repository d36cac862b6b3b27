"""A caller's handler, lent to one run.

A handler of torch's serves its store for as long as something holds it.  What a run leaves behind is partly held by
cycles, ours and anyio's, until the next collection; a second run at the same endpoint would find the store of the first
one, and a process forked meanwhile would abort as it collects the store's threads.  So a run holds this, and not the
handler itself, which it lets go of when it ends.
"""

from __future__ import annotations

from typing import Any


class LentHandler:
    """The handler, for everything but its type."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def borrowed(self) -> Any:
        """The handler itself."""
        return self._handler

    def give_back(self) -> None:
        """The run has ended."""
        self._handler = None


def lent(handler: Any) -> LentHandler:
    """The handler, if it is not lent already."""
    return handler if type(handler) is LentHandler else LentHandler(handler)
