"""The agent's end of the sockets of workers that recover in place: messages in become events, actions become messages.

Each process of a worker has its own socket, to which it connects when the script calls a function decorated with
`in_place`.  A worker that never connects has not opted in.  The socket accepts one connection; then its path is
removed, so that no child process of the worker finds it (`aelastic.training.messages` describes the protocol).
"""

from __future__ import annotations

import errno
import logging
import math
import os
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial

import anyio

from aelastic.agent.channels import ControlSockets
from aelastic.agent.group import events as ev
from aelastic.agent.kept_connections import KeptConnections
from aelastic.base.loop.sockets import wait_readable
from aelastic.diagnose.failures.failure import SENTENCE_CHARS_MAX
from aelastic.training import messages

_log = logging.getLogger(__name__)

# The kernel doubles it (socket(7)).  Its default is larger, unless somebody has set net.core.wmem_default.
_SEND_BUFFER = messages.MAX_PACKET


class WorkerLinks:
    """The sockets of one generation, by local rank.

    Args:
        generation: the number of the generation.
        sockets: names their paths.
        post: takes the workers' messages, as events.
    """

    def __init__(self, generation: int, sockets: ControlSockets, post: Callable[[ev.Event], None]) -> None:
        self._generation, self._sockets, self._post = generation, sockets, post
        self._links: dict[int, _Link] = {}
        self.differing: set[int] = set()  # local ranks whose state differs from ranks that should have the same
        self._kept = KeptConnections()

    def listen(self, local_rank: int, process: int) -> dict[str, str]:
        """Opens the socket of a process that is about to start, and returns the variables that name it.

        Returns none if this host refuses the socket: then the worker cannot opt in.
        """
        self.differing.discard(local_rank)
        path = self._sockets.in_place_path(self._generation - 1, local_rank)
        try:
            key = self._generation, local_rank, process
            on_differ = partial(self.differing.add, local_rank)
            self._links[local_rank] = _Link(path, key, self._post, on_differ, self._kept)
        except OSError as error:
            _log.warning("no recovery in place for local rank %d: %s cannot be opened (%s)", local_rank, path, error)
            return {}
        return {messages.SOCKET_VARIABLE: messages.variable(path)}

    async def follow(self, local_rank: int) -> None:
        """Posts a worker's messages, until its socket is closed."""
        if (link := self._links.get(local_rank)) is not None:
            await link.run()

    def on_ended(self, local_rank: int) -> None:
        """A worker's process has ended."""
        if (link := self._links.pop(local_rank, None)) is not None:
            link.close()

    def present(self, local_ranks: Collection[int]) -> dict[int, _Link]:
        """Returns the links of the processes that have these ranks now, by local rank."""
        return {rank: link for rank in local_ranks if (link := self._links.get(rank)) is not None}

    def begin(self, link: _Link, round_: int, env: Mapping[str, str | None], patience_s: float) -> None:
        """Tells a process, which may have ended, to enter a round.  All workers of the job have left the last one."""
        self._kept.end_before(round_)
        patience = math.ceil(patience_s)
        link.send(messages.encode(messages.BEGIN, round=round_, env=dict(env), patience=patience))

    def hold(self, round_: int) -> None:
        """Notifies the workers that one has failed, and that the round is held for the user to look at it."""
        for local_rank in self._links:
            self._send(local_rank, messages.encode(messages.HELD, round=round_))

    def leave(self, local_ranks: Collection[int], round_: int, why: str) -> None:
        """Tells workers to leave a round.  The reason may quote a worker's error; it is cut to fit in a packet."""
        packet = messages.encode(messages.OVER, round=round_, why=why[:SENTENCE_CHARS_MAX])
        for local_rank in local_ranks:
            self._send(local_rank, packet)

    def release(self) -> None:
        """Notifies the workers that all their functions have returned, so that each can end."""
        for local_rank in self._links:
            self._send(local_rank, messages.encode(messages.END))

    def _send(self, local_rank: int, packet: bytes) -> None:
        if (link := self._links.get(local_rank)) is not None:
            link.send(packet)

    def close(self) -> None:
        for local_rank in [*self._links]:
            self.on_ended(local_rank)
        self._kept.end()


class _Link:
    """One socket: first it listens, then it is the connection of the first process that connects."""

    def __init__(
        self,
        path: str,
        key: tuple[int, int, int],  # generation, local rank, process
        post: Callable[[ev.Event], None],
        on_differ: Callable[[], None],
        kept: KeptConnections,
    ) -> None:
        self._path, self._key, self._post, self._on_differ, self._kept = path, key, post, on_differ, kept
        self._is_running = self._has_path = False
        self._running = anyio.CancelScope()
        with suppress(FileNotFoundError):
            os.unlink(path)  # the path of the rank's last process, if that never connected
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.bind(path)
            self._has_path = True
            self._socket.listen(1)
        except BaseException:
            self.close()
            raise

    async def run(self) -> None:
        """Waits for the process, then posts its messages, until it ends or the socket is closed."""
        self._is_running = True
        try:
            with self._running:
                await wait_readable(self._socket)
                self._accept()
                while True:
                    await wait_readable(self._socket)
                    self._receive()
        finally:
            self.close()
            self._socket.close()

    def _accept(self) -> None:
        listener = self._socket
        try:
            self._socket, _ = listener.accept()
        except OSError:
            return self.close()  # the process is gone
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        listener.close()
        self._remove_path()
        return None

    def _receive(self) -> None:
        try:
            packet, copies, _, _ = socket.recv_fds(
                self._socket, messages.MAX_PACKET + 1, messages.MAX_COPIES, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return
        except OSError:
            packet, copies = b"", []
        if not self._handle(packet, copies):
            for copy in copies:
                os.close(copy)

    def _handle(self, packet: bytes, copies: list[int]) -> bool:
        """Handles a packet; returns whether the copies are kept."""
        if not packet:
            self.close()  # the process is gone; its end is handled elsewhere
            return False
        try:
            message = messages.decode(packet)
        except ValueError as error:
            self._warn_and_close(str(error))
            return False
        if message["kind"] == messages.KEEP:
            self._kept.add(message["round"], copies)
            return True
        match message:
            case {"kind": messages.READY, "round": round_}:
                self._post(ev.Ready(*self._key, round_))
            case {"kind": messages.SHARED, "round": round_, "step": step, "source": source}:
                self._post(ev.Shared(*self._key, round_, step, source))
            case {"kind": messages.DIFFER}:
                self._on_differ()
            case {"kind": messages.LOST, "round": round_}:
                self._post(ev.StateLost(*self._key, round_))
            case {"kind": messages.DONE, "round": round_}:
                self._post(ev.Done(*self._key, round_))
            case _:
                pass  # a message of the agent's
        return False

    def send(self, packet: bytes) -> None:
        """Sends a packet.  A worker that does not read does not leave its round in time either, and is then killed.

        If the system rejects a packet as too large, the socket is closed, and the worker that would wait for it ends.
        """
        try:
            self._socket.send(packet)
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                self._warn_and_close(f"a message of {len(packet)} bytes is larger than net.core.wmem_max allows")

    def _warn_and_close(self, why: str) -> None:
        _, local_rank, _ = self._key
        _log.warning("closing the in-place socket of local rank %d: %s", local_rank, why)
        self.close()

    def close(self) -> None:
        """Closes the socket; while `run` runs, it closes the socket itself, because the loop may be waiting for it."""
        self._running.cancel()
        self._remove_path()
        if not self._is_running:
            self._socket.close()

    def _remove_path(self) -> None:
        if self._has_path:
            self._has_path = False
            with suppress(OSError):
                os.unlink(self._path)
