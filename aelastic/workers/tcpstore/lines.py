"""Several connections to one store, for a network that loses packets.

TCP sends a lost packet again after 0.2 s, then after 0.4 s, and so on: if many are lost, a connection often stalls for
seconds.  Several connections seldom all do.  So a question that is answered late is asked on another connection as
well, and the first answer counts.  It may reach the store more than once.

This module is part of the program `server.py`: it imports nothing of the package.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

# A store answers in milliseconds, unless it is on another continent.
LATE_S = 0.1
RETRY_INTERVAL_S = 0.1


class PendingCall:
    """A question, and its answers: each is a value or an error, and the first one counts."""

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self.ask = ask
        self.is_answered = False
        self.answers: SimpleQueue[tuple[Any, RuntimeError | None]] = SimpleQueue()

    def answer(self, value: Any, error: RuntimeError | None = None) -> None:
        self.is_answered = True
        self.answers.put((value, error))


class Lines:
    """One connection at first; others are opened as they are needed.  Each has a thread, which waits without a limit.

    Args:
        connect: returns the client of a new connection, or raises `RuntimeError`.
        most: the maximum number of connections.
    """

    def __init__(self, connect: Callable[[], Any], most: int) -> None:
        self._connect, self._most = connect, most
        self._calls: SimpleQueue[PendingCall | None] = SimpleQueue()
        self._count = 0
        self._closed = threading.Event()
        self._open(connect())

    def ask(self, ask: Callable[[Any], Any]) -> Any:
        """Asks on one connection after the other until there is an answer.

        Args:
            ask: called with a client; it may be called several times.

        Raises:
            RuntimeError: a connection was lost.
        """
        call = PendingCall(ask)
        for number in range(1, self._most + 1):
            if number > self._count:
                self._open(None)
            self._calls.put(call)
            try:
                value, error = call.answers.get(timeout=LATE_S if number < self._most else None)
            except Empty:
                continue
            if error is not None:
                raise error
            return value
        raise AssertionError("the last wait has no limit")

    def close(self) -> None:
        """Ends the connections, each once it has its answer."""
        self._closed.set()
        for _ in range(self._count):
            self._calls.put(None)

    def _open(self, client: Any) -> None:
        self._count += 1
        threading.Thread(target=self._run, args=(client,), daemon=True).start()

    def _run(self, client: Any) -> None:
        while client is None:
            try:
                client = self._connect()
            except RuntimeError:  # other connections may have the answer
                if self._closed.wait(RETRY_INTERVAL_S):
                    return
        while (call := self._calls.get()) is not None:
            if call.is_answered:
                continue
            try:
                call.answer(call.ask(client))
            except RuntimeError as error:
                call.answer(None, error)
