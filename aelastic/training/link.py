"""The connection of a worker to its agent, and the thread that listens to it.

The thread notes what the agent sends, and cuts the sockets of a round that is over, so that the main thread leaves its
collective.  It raises nothing in the main thread: Python code is never interrupted at an arbitrary place.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from aelastic.training import messages
from aelastic.training.sockets import GroupSockets

_CONNECT_S = 5.0  # an agent that is not stopped accepts within milliseconds
_AGAIN_S = 0.01  # between two cuts, where groups were being made as the round ended
_FLUSH_S = 1.0
_LONGER_S = 0.2
_PEER_S = 1.0  # from a peer's closed socket to the agent's message
_UPDATE_S = 1.0  # how long the end of a round waits for an update; a script may wait for a lost rank before its commit
_UPDATE_AGAIN_S = 0.001  # between two checks whether the update has ended


class RoundOver(BaseException):  # not an `Exception`, so that `except Exception` in a script lets it pass
    """Another rank was lost, or the job's membership changes: this rank leaves the round."""


def connect() -> socket.socket | None:
    """Connects to the socket that the environment names; returns None if there is none, or nobody accepts.

    Prints a line if the agent's socket exists but cannot be reached.
    """
    path = messages.socket_path(os.environ.get(messages.SOCKET_VARIABLE))
    if path is None:
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(_CONNECT_S)
        connection.connect(path)
        connection.settimeout(None)
    except OSError as error:
        connection.close()
        is_used = isinstance(error, FileNotFoundError | ConnectionRefusedError)  # by another process of this worker
        if not is_used:
            _print(f"aelastic: cannot connect to the agent at {path} ({error}): failures restart all workers")
        return None
    return connection


class Link:
    """Keeps what the agent has sent, for the main thread to wait for, and sends the main thread's messages."""

    def __init__(self, connection: socket.socket, sockets: GroupSockets, abort: Callable[[], None]) -> None:
        """Starts the thread.

        Args:
            connection: to the agent.
            sockets: of the current round's process groups.
            abort: ends the communicators of backends that have no sockets to cut; called in the thread.
        """
        self.sockets = sockets
        self._abort = abort
        self._connection = connection
        self._changed = threading.Condition()
        self._begin: dict[str, Any] | None = None
        self._over = self._held = self._aborted = self._left = -1  # rounds
        self._ending = -1  # the round that is over once this rank's update has ended
        self._ends_by = 0.0
        self._is_updating = False
        self._is_ended = self._is_fork = False
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._listen, name="aelastic-in-place", daemon=True).start()

    def send(self, kind: str, **fields: Any) -> None:
        if not self._is_fork:
            with contextlib.suppress(OSError):  # the agent is gone: the thread ends this process
                self._connection.send(messages.encode(kind, **fields))

    def keep_connections(self, number: int) -> None:
        """Hands copies of new groups' connections to the agent, which keeps them until the round has ended everywhere.

        Otherwise they would end as this process is killed, and a peer that is about to send could wait for good.
        """
        packet = messages.encode(messages.KEEP, round=number)
        copies = self.sockets.new_connections()
        for start in range(0, len(copies), messages.MAX_COPIES):
            if not self._is_fork:
                with contextlib.suppress(OSError):  # the agent is gone, or this user has too many on their way
                    socket.send_fds(self._connection, [packet], copies[start : start + messages.MAX_COPIES])

    def wait_for_begin(self, last: int) -> dict[str, Any]:
        """Waits for the message that begins the round after `last`.  Signals have their default effect meanwhile."""
        self._wait_with_default_signals(lambda: self._begin is not None and self._begin["round"] > last)
        assert self._begin is not None
        return self._begin

    def wait_for_end(self, number: int) -> bool:
        """Waits; returns True if all ranks are done, False if the job continues after this round.  Signals as above."""
        self.end_update()
        self._wait_with_default_signals(lambda: self._is_ended or self.is_over(number))
        return self._is_ended

    def wait_to_be_ended(self, timeout_s: float) -> None:
        """Waits for the agent to end this process by a signal; returns if that takes longer than the timeout."""
        until = time.monotonic() + timeout_s
        self._wait_with_default_signals(lambda: time.monotonic() >= until, timeout_s)

    def wait_for_over(self, number: int, timeout_s: float) -> bool:
        """Whether the agent ends this round within the time, or later if it reports that the round is held."""
        self.end_update()  # an error has ended it before its commit
        with self._changed:
            self._changed.wait_for(lambda: self.is_over(number) or self._held >= number, timeout_s)
            return self._changed.wait_for(lambda: self.is_over(number), None if self._held >= number else 0)

    def unless_over(self, number: int, call: Callable[[], Any]) -> Any:
        """Makes the call in a thread, since nothing else can interrupt it, and returns its value.

        If the round ends first, the call gets a little longer: it usually ends by itself.  If it does not, its thread
        is left behind.

        Raises:
            RoundOver: the round ended first.
        """
        values: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                values.append(call())
            except BaseException as error:  # noqa: BLE001  raised in the main thread
                errors.append(error)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=run, name="aelastic-call", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: bool(values or errors) or self.is_over(number))
            self._changed.wait_for(lambda: bool(values or errors), _LONGER_S)
        if errors:
            raise errors[0]
        if not values:
            raise RoundOver
        return values[0]

    def is_over(self, number: int) -> bool:
        return self._over >= number

    def check(self, number: int) -> None:
        """Raises RoundOver if the round is over, or if a peer's socket is closed and the agent soon reports the end."""
        if self._is_fork:
            return
        is_in_doubt = self._ending < number and self.sockets.is_cut_by_peer()
        if is_in_doubt and not self._receives_end(number, _PEER_S):
            self.sockets.watch_no_more()
        if self.is_over(number):
            raise RoundOver

    def _receives_end(self, number: int, timeout_s: float) -> bool:
        """Whether the agent ends this round within the time; an update may still be in the way."""
        with self._changed:
            return self._changed.wait_for(lambda: self._ending >= number, timeout_s)

    def begin_update(self, number: int) -> bool:
        """Returns whether this round is over.  If not, its end waits for the end of the update, but not for long.

        Called in each step, so it takes no lock unless the round is ending.  This thread sets `_is_updating` and
        then reads `_ending`; the other thread sets `_ending` and then reads `_is_updating`.  So at least one of them
        sees what the other has set.
        """
        if self._is_fork:
            return False
        self._is_updating = True
        if self._ending < number:
            return False
        with self._changed:
            return self.is_over(number)

    def end_update(self) -> None:
        """Notes that the state is whole again, or will not be in this round."""
        self._is_updating = False  # without the lock, for the same reason
        if self._over < self._ending and not self._is_fork:
            with self._changed:
                self._end_round()

    def _end_round(self) -> None:
        """Ends the round if the agent has, and no update is in the way.  Called with the lock."""
        if self._over < self._ending and not (self._is_updating and time.monotonic() < self._ends_by):
            self._over = self._ending
            self._changed.notify_all()

    def leave(self, number: int) -> None:
        """Notes that this process has closed the sockets of the round, or that no thread waits on one any more."""
        with self._changed:
            self._left = number
            self._is_updating = False
        self.sockets.end()

    @property
    def is_ended(self) -> bool:
        return self._is_ended or self._is_fork

    def _wait_with_default_signals(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Ending a waiting worker is safe at any time; the script's SIGTERM handler would only save once more."""
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.getsignal(signal.SIGTERM) if is_main else None  # None also if it is not Python's
        if handler is not None:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            with self._changed:
                self._changed.wait_for(condition, timeout_s)
        finally:
            if handler is not None:
                signal.signal(signal.SIGTERM, handler)

    def _forget(self) -> None:
        """A process that is forked from this one, such as a data loader's worker, has no part in the job."""
        self._is_fork = True
        self._connection.close()

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        while not self._is_ended:
            if poll.poll(self._again_ms()):
                self._receive()
            if self._over < self._ending:
                with self._changed:
                    self._end_round()
            if self._left < self._over:
                self._cut()

    def _again_ms(self) -> float | None:
        """Returns after how many milliseconds there is something to do, even if the agent sends nothing."""
        if self._over < self._ending:
            return _UPDATE_AGAIN_S * 1000
        is_cutting = self._left < self._over and (self.sockets.is_to_be_cut or self._aborted < self._over)
        return _AGAIN_S * 1000 if is_cutting else None

    def _receive(self) -> None:
        try:
            packet = self._connection.recv(messages.MAX_PACKET + 1)
        except OSError:
            packet = b""
        if not packet:
            _exit("aelastic: the agent is gone; this worker ends")
        try:
            message = messages.decode(packet)
        except ValueError as error:
            _print(f"aelastic: dropped a message of the agent: {error}")
            return
        with self._changed:
            match message["kind"]:
                case messages.BEGIN:
                    self._begin = message
                case messages.HELD:
                    self._held = max(self._held, message["round"])
                case messages.OVER:
                    self._ending = max(self._ending, message["round"])
                    self._ends_by = time.monotonic() + _UPDATE_S
                    self._end_round()
                case messages.END:
                    self._is_ended = True
            self._changed.notify_all()

    def _cut(self) -> None:
        self.sockets.cut(int(os.environ.get("WORLD_SIZE", "1")))
        if self._aborted < self._over:
            self._aborted = self._over
            self._abort()


def _print(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def _exit(line: str) -> None:
    """Ends this process; the main thread may be in a call that never returns."""

    def flush() -> None:
        _print(line)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stdout.flush()

    flushing = threading.Thread(target=flush, daemon=True)  # the main thread may hold the buffer's lock
    flushing.start()
    flushing.join(_FLUSH_S)
    os._exit(1)
