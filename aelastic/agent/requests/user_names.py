"""The names of users who ask, looked up beside the loop: a directory server may take minutes, or never answer."""

from __future__ import annotations

import pwd
import threading

from aelastic import aio

WITHIN_S = 1.0  # a request waits no longer for a name that stands in its reason


class UserNames:
    """Looks names up, and starts no second thread for one that hangs."""

    def __init__(self) -> None:
        self._late: dict[int, threading.Event] = {}  # look-ups that took too long, by user: set once they have ended

    async def of(self, user: int) -> str:
        """A user's name; its number where nobody knows the name, or nobody says it in time."""

        def look_up() -> str:
            try:
                return pwd.getpwuid(user).pw_name
            finally:
                has_ended.set()

        if user in self._late and not self._late[user].is_set():
            return str(user)
        has_ended = threading.Event()
        try:
            return await aio.in_thread(look_up, within_s=WITHIN_S)
        except KeyError:
            return str(user)
        except TimeoutError:
            self._late[user] = has_ended
            return str(user)
