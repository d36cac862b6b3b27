"""What the first workers import: each writes the names of modules into one pipe, as it imports them."""

from __future__ import annotations

import os

import anyio

# By then a script has imported what it needs to train, if it does not say so earlier (`init_process_group`).
LEARN_TIMEOUT_S = 30.0
END = "."  # a worker has initialized its process group


class Imports:
    """The pipe, and what came through it."""

    def __init__(self) -> None:
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)

    async def gather(self) -> tuple[str, ...]:
        """The names in the order in which they were first imported; returns when a worker is about to train."""
        names: dict[str, None] = {}
        rest = ""
        with anyio.move_on_after(LEARN_TIMEOUT_S):
            while END not in names:
                await anyio.wait_readable(self._reader)
                *lines, rest = (rest + os.read(self._reader, 65536).decode(errors="replace")).split("\n")
                names.update(dict.fromkeys(lines))
        names.pop(END, None)
        return tuple(names)

    def close(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            os.close(self.writer)
            self._reader = self.writer = -1
