"""Looks up users' names outside the event loop: a directory server may take minutes, or never answer."""

from __future__ import annotations

import asyncio
import pwd
from concurrent.futures import Future
from functools import partial

import anyio

from aelastic.base.host import daemon_threads

WITHIN_S = 1.0  # how long a request waits for the name that its reason mentions


class UserNames:
    """Looks names up, without starting a second thread for a name that takes long."""

    def __init__(self) -> None:
        self._late: dict[int, Future[str]] = {}  # look-ups that took too long, by user

    async def of(self, user: int) -> str:
        """Returns a user's name, or the user id if the name is unknown or takes too long to look up."""
        if user in self._late and not self._late[user].done():
            return str(user)
        try:
            answer = daemon_threads.begin(partial(_look_up, user), f"user {user}")
        except RuntimeError:  # the host refuses another thread
            return str(user)
        with anyio.move_on_after(WITHIN_S):
            return await asyncio.wrap_future(answer)
        self._late[user] = answer
        return str(user)


def _look_up(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
