"""How process groups are made within a round: where a wait for a lost rank must end, and what they leave to be cut."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from torch import distributed as dist

from aelastic.training import torch_private
from aelastic.training.link import Link, RoundOver

_TRY_S, _PAUSE_S = 0.5, 0.05  # one attempt to reach the store; between two


class Forming:
    """The process groups of one round, as long as it lasts."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self.groups: list[Any] = []  # a script's `ddp` must not hold the last reference to its group: see `leaving`

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Sockets of groups that are made meanwhile are noted; if the round is over, none is made."""
        with torch_private.making_groups(self._make_group, self._make_store):
            yield

    def _make_group(self, make: torch_private.Make) -> torch_private.Make:
        def make_group(*args: Any, **kwargs: Any) -> Any:
            with self._opening(is_watched=True):
                made = make(*args, **kwargs)
                group, _ = made
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    self.groups.append(group)
            return made

        return make_group

    def _make_store(self, rendezvous: torch_private.Make) -> torch_private.Make:
        def make_store(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._opening(is_watched=False):  # the agent's store may end before the round does
                self._wait_for_store(kwargs.get("timeout"))
                made = next(rendezvous(*args, **kwargs))
            yield made

        return make_store

    @contextlib.contextmanager
    def _opening(self, *, is_watched: bool) -> Iterator[None]:
        with self._link.sockets.opening(is_watched=is_watched):
            # Not before: the round may end in between, and the thread cuts what is being opened as it ends.
            self._check()
            yield
            self._check()

    def _check(self) -> None:
        if self._link.is_over(self._number):
            raise RoundOver

    def _wait_for_store(self, timeout: dt.timedelta | None) -> None:
        """Waits until the store's host answers; torch would try for minutes, and cannot be interrupted.

        Raises:
            RoundOver: the round ended first.
        """
        host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT", "")
        if not host or not port.isdigit():
            return  # torch says what is missing
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        while deadline is None or time.monotonic() < deadline:
            try:
                socket.create_connection((host, int(port)), _TRY_S).close()
            except OSError:
                if self._link.wait_for_over(self._number, _PAUSE_S):
                    raise RoundOver from None
            else:
                return
