"""Copies of the connections between workers that recover in place: they stay open until a round has ended everywhere.

A killed worker would close its connections at once.  gloo forgets a message that it is about to send on a closed
connection, and the sender waits forever, although its own sockets are shut down soon after (torch 2.13).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Collection


class KeptConnections:
    """The copied descriptors, by the round that they belong to."""

    def __init__(self) -> None:
        self._copies: dict[int, list[int]] = {}

    def add(self, round_: int, copies: Collection[int]) -> None:
        """Takes ownership of the descriptors."""
        most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        for copy in copies:
            if most != resource.RLIM_INFINITY and copy >= most // 2:
                os.close(copy)  # the agent needs the others
            else:
                self._copies.setdefault(round_, []).append(copy)

    def end_before(self, round_: int) -> None:
        """All ranks of the job have left the rounds before this one."""
        for each in [each for each in self._copies if each < round_]:
            for copy in self._copies.pop(each):
                os.close(copy)

    def end(self) -> None:
        """No rank can recover any more."""
        for copies in self._copies.values():
            for copy in copies:
                os.close(copy)
        self._copies.clear()
