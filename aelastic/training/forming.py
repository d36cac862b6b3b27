"""Makes the process groups of a round, so that no wait for a lost rank outlasts the round."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import time
from collections.abc import Iterator
from typing import Any

from torch import distributed as dist

from aelastic.training import torch_private
from aelastic.training.link import Link, RoundOver

# One try to reach the store.  torch asks the name server about each address, which takes 10 s if that does not answer.
_TRY_S = 20.0


class Forming:
    """The process groups of one round."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self.groups: list[Any] = []  # a script's `ddp` must not hold the last reference to its group: see `leaving`

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within the `with` block, notes the sockets of new groups, and makes none once the round is over."""
        with torch_private.making_groups(self._make_group, self._make_store):
            yield

    def _make_group(self, make: torch_private.Make) -> torch_private.Make:
        def make_group(*args: Any, **kwargs: Any) -> Any:
            with self._link.sockets.opening():
                # Checked only now: the round may end just before, and the thread cuts only what is being opened then.
                self._check()
                made = make(*args, **kwargs)
                group, _ = made
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    self.groups.append(group)
            self._link.keep_connections(self._number)
            self._check()
            return made

        return make_group

    def _make_store(self, rendezvous: torch_private.Make) -> torch_private.Make:
        def make_store(*args: Any, **kwargs: Any) -> Iterator[Any]:
            with self._link.sockets.opened():
                # Once the agent has ended the store, a call that is left behind tries to reach it in vain.
                made = self._link.unless_over(self._number, lambda: self._connect(rendezvous, args, kwargs))
            self._check()
            yield made

        return make_store

    def _connect(self, rendezvous: torch_private.Make, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Connects to the store in short tries: a try cannot be interrupted, and keeps its thread until it ends."""
        timeout = kwargs.get("timeout")
        if timeout is None or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            return next(rendezvous(*args, **kwargs))
        until = time.monotonic() + timeout.total_seconds()
        while True:
            left_s = until - time.monotonic()
            try:
                return next(rendezvous(*args, **{**kwargs, "timeout": dt.timedelta(seconds=min(left_s, _TRY_S))}))
            except RuntimeError:
                if self._link.is_over(self._number) or left_s <= _TRY_S:
                    raise

    def _check(self) -> None:
        if self._link.is_over(self._number):
            raise RoundOver
