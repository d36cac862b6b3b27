"""The names of users who ask, looked up beside the loop: a directory server may take minutes, or never answer."""

from __future__ import annotations

import asyncio
import pwd
import threading
from concurrent.futures import Future

import anyio

WITHIN_S = 1.0  # a request waits no longer for a name that stands in its reason


class UserNames:
    """Looks names up, and starts no second thread for one that takes long.

    The threads are daemons, and none of anyio's: the interpreter's end does not wait for a look-up that hangs.
    """

    def __init__(self) -> None:
        self._late: dict[int, Future[str]] = {}  # look-ups that took too long, by user

    async def of(self, user: int) -> str:
        """A user's name; its number where nobody knows the name, or nobody says it in time."""
        if user in self._late and not self._late[user].done():
            return str(user)
        answer: Future[str] = Future()
        answer.set_running_or_notify_cancel()  # who gives up does not cancel it
        try:
            threading.Thread(target=_look_up, args=(user, answer), name=f"user {user}", daemon=True).start()
        except RuntimeError:  # the host refuses another thread
            return str(user)
        with anyio.move_on_after(WITHIN_S):
            return await asyncio.wrap_future(answer)
        self._late[user] = answer
        return str(user)


def _look_up(user: int, answer: Future[str]) -> None:
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:
        name = str(user)
    answer.set_result(name)
