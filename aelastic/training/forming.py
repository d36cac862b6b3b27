"""How process groups are made within a round: where a wait for a lost rank must end, and what they leave to be cut."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import distributed as dist

from aelastic.training import torch_private
from aelastic.training.link import Link, RoundOver


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
            with self._link.sockets.opening():
                # Not before: the round may end in between, and the thread cuts what is being opened as it ends.
                self._check()
                made = make(*args, **kwargs)
                group, _ = made
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    self.groups.append(group)
            self._check()
            return made

        return make_group

    def _make_store(self, rendezvous: torch_private.Make) -> torch_private.Make:
        def make_store(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._link.sockets.opened():
                made = self._unless_over(lambda: next(rendezvous(*args, **kwargs)))
            self._check()
            yield made

        return make_store

    def _unless_over(self, connect: Callable[[], Any]) -> Any:
        """The connection to the store, made in a thread of its own.

        If the round ends first, nobody waits for it: torch asks the name server about each address that it connects
        to, and tries a host that does not answer for minutes.

        Raises:
            RoundOver: the round ended first.
        """
        made: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                made.append(connect())
            except BaseException as error:  # noqa: BLE001  raised in the main thread
                errors.append(error)
            self._link.wake()

        threading.Thread(target=run, name="aelastic-store", daemon=True).start()
        self._link.wait_unless_over(self._number, lambda: bool(made or errors))
        if errors:
            raise errors[0]
        if not made:
            raise RoundOver
        return made[0]

    def _check(self) -> None:
        if self._link.is_over(self._number):
            raise RoundOver
