"""A caller's handler, lent to one run.

A torch handler serves its store as long as something references it.  Reference cycles, ours and anyio's, keep parts of
a run alive until the next collection; a second run at the same endpoint would find the store of the first one, and a
process forked meanwhile would abort as it collects the store's threads.  So a run references this instead of the
handler, and drops the handler when it ends.
"""

from __future__ import annotations

from typing import Any


class LentHandler:
    """A proxy that behaves like the handler, except for its type."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handler, name)

    def borrowed(self) -> Any:
        """Returns the handler itself."""
        return self._handler

    def give_back(self) -> None:
        """Drops the handler; called when the run has ended."""
        self._handler = None


def lent(handler: Any) -> LentHandler:
    """Lends a handler, unless it is lent already."""
    return handler if type(handler) is LentHandler else LentHandler(handler)
