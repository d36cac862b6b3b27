"""torch's TCPStore as the stores use it: a child process that serves one at an endpoint, or is a client of it.

torch's own client makes all requests.  But it has no limits: it waits endlessly for an answer, and retries what cannot
work.  So the endpoint is first tried with our own connection, which also shows this agent's address, and a child that
does not return is killed.

A store whose process is starting accepts connections but does not answer, for half a second or for a minute.  A server
that sends something else is certainly not a store.
"""

from __future__ import annotations

import binascii
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import anyio

from aelastic.errors import InputError, RendezvousConnectionError, RendezvousError, RendezvousStateError
from aelastic.rdzv.stores.endpoints import RESOLVE_TIMEOUT_S, Endpoint, first_words, probe
from aelastic.workers.tcpstore.child import Death, Fork, Refusal, StoreProcess, Unanswered

_log = logging.getLogger(__name__)

T = TypeVar("T")

# How long torch's client retries a connection that fails, after the probe has succeeded.
CONNECT_TIMEOUT_S = 1.0
# A process that dies closes its connections a moment before its port, or after.
DEATH_S = 0.03
# After this long without an answer, the endpoint is tried for another protocol, whose server waits for a line of text.
SILENCE_S = 5.0
# A round trip to a process that does nothing else.
ANSWER_TIMEOUT_S = 5.0
# A store that an agent serves lives and dies with the agent's job, which this key names.
SERVED_FOR = "aelastic/served_for"
# The error of torch's client after an answer that no store sends.
_NOT_UNDERSTOOD = "Ping failed"


class NoStoreError(RendezvousStateError):
    """The server at the endpoint is not a TCPStore."""

    topic = "another-program-answers-at-the-endpoint"


class LostError(RendezvousConnectionError):
    """The connection to the store was lost."""


class OtherJobError(InputError):
    """The store at the endpoint is served for another run id."""

    topic = "the-endpoint-serves-another-job"


def run_key(run_id: str, name: str = "") -> str:
    """Returns a key of a run id, which may be any text."""
    return f"aelastic/{printable(run_id)}/{name}"


def printable(run_id: str) -> str:
    return quote(run_id, safe="", errors="surrogatepass")


class TcpStore:
    """The store at an endpoint, as one agent uses it: one operation at a time, each of which may be cancelled.

    Requests raise `RendezvousConnectionError` if the store is lost.  `is_connected` is usually false after that.

    Args:
        endpoint: where the store is.
        run_id: the run id; a store served by an agent of another one is refused.
        env: the environment of the child process.
        read_timeout_s: how long a store may be silent.
        fork: see `StoreProcess`.
        look_up_s: how long to wait for a name server.
        lines: how many connections to another agent's store there may be (`workers/tcpstore/lines.py`).
    """

    def __init__(
        self,
        endpoint: Endpoint,
        run_id: str,
        env: Mapping[str, str],
        read_timeout_s: float,
        fork: Fork | None = None,
        look_up_s: float = RESOLVE_TIMEOUT_S,
        lines: int = 1,
    ) -> None:
        self.endpoint = endpoint
        self._lines = lines
        self.is_connected = False
        self.is_serving = False
        self.own_address = ""  # our end of the connection, if the store is another agent's
        self._run_id = run_id
        self._read_timeout_s, self._look_up_s = read_timeout_s, look_up_s
        self._process = StoreProcess(env, "held the rendezvous store", fork=fork)
        self._listeners: Sequence[socket.socket] = ()  # until the child serves on them
        self._was_reached = False
        self._late = 0  # consecutive answers that did not come in time

    @property
    def is_about_to_serve(self) -> bool:
        """Whether the port is open, but the store is not there, because `serve` was cancelled."""
        return bool(self._listeners)

    async def serve(self, listeners: Sequence[socket.socket] = ()) -> None:
        """Serves a store.

        Args:
            listeners: sockets to serve on, which this object then owns; none: those of a call that was cancelled.

        Raises:
            RendezvousConnectionError: the child died, or hangs.
            InputError: it cannot import torch.
        """
        self.is_connected, self.is_serving = False, True
        if listeners:
            self._listeners = listeners
            if self._process.is_busy:
                # For a cancelled caller, the child is connected to this very port, and waits for an answer of the store
                # that it would serve next.
                await self._process.aclose()
        assert self._listeners
        keys = {SERVED_FOR: printable(self._run_id)}
        try:
            files = [each.fileno() for each in self._listeners]
            await self._ask("serve", *files, timeout_s=self._read_timeout_s, keys=keys)
        except (RendezvousConnectionError, InputError):
            self._close_listeners()
            raise
        # If it stayed open here, the port would outlive the store.
        self._close_listeners()
        self.is_connected = self._was_reached = True

    async def connect(self) -> None:
        """Becomes a client of the store at the endpoint.

        Raises:
            RefusedError: the port is closed.
            RendezvousConnectionError: it cannot be reached, or hangs up.
            NoStoreError: the server there is not a TCPStore.
            OtherJobError: the store is served for another run id.
            InputError: the child cannot import torch.
        """
        self.is_connected = self.is_serving = False
        way = await probe(self.endpoint, self._look_up_s)
        self.own_address = "" if "%" in way.own_address else way.own_address  # only this machine knows a scope
        if self._process.is_busy:  # with a request that may never end, for a cancelled caller
            await self._process.aclose()
        await self._handshake(way.address)
        self.is_connected = self._was_reached = True
        await self.check_run_id()

    async def _handshake(self, host: str) -> None:
        silence_s = min(SILENCE_S, self._read_timeout_s)
        try:
            try:
                await self._process.ask(
                    "connect",
                    timeout_s=silence_s,
                    host=host,
                    port=self.endpoint.port,
                    limit_s=CONNECT_TIMEOUT_S,
                    lines=self._lines,
                )
            except Unanswered as late:
                if not late.number:
                    raise
                await self._look_at_silence(silence_s)
                await self._process.answer_to(late.number, self._read_timeout_s - silence_s)
        except Refusal as refusal:
            if _NOT_UNDERSTOOD in str(refusal):
                words = await first_words(self.endpoint)
                raise self._no_store(f"it answered {words}" if words else str(refusal)) from None
            raise RendezvousConnectionError(
                f"the rendezvous endpoint {self.endpoint} closed the connection: {refusal}",
                reason=f"it closed the connection: {refusal}",
            ) from None
        except Death as death:
            raise self._died(death) from None
        except Unanswered as late:
            if not late.number:
                raise self._is_starting() from None
            await self._process.aclose()
            silence = f"it accepted the connection but did not answer for {self._read_timeout_s:g} s"
            if self._was_reached:
                raise RendezvousConnectionError(
                    f"no answer from the rendezvous endpoint {self.endpoint}: {silence}", reason=silence
                ) from None
            raise self._no_store(silence) from None

    async def _look_at_silence(self, silence_s: float) -> None:
        """Looks for another program at an endpoint that has not answered yet, and reports what it may be."""
        if words := await first_words(self.endpoint):
            raise self._no_store(f"it answered {words}") from None
        if not self._was_reached:
            _log.warning(
                "%s accepts connections, but has not answered as a TCPStore for %g s: is it still starting, or does "
                "another program use that port? waiting up to %g s",
                self.endpoint,
                silence_s,
                self._read_timeout_s,
                extra={"topic": "another-program-answers-at-the-endpoint"},
            )

    def _no_store(self, why: str) -> NoStoreError:
        return NoStoreError(
            f"{self.endpoint} is not a torch TCPStore ({why}); another program uses that port: choose another "
            "--rdzv-endpoint"
        )

    async def insist(self, do: Callable[[], Awaitable[T]]) -> T:
        """Does something that connects to the store on its own, and repeats it if the connection is lost meanwhile.

        Usually the process that served the store has ended.  Another one may serve it by now, or this very agent can.
        """
        try:
            return await do()
        except LostError:
            await anyio.sleep(DEATH_S)
            return await do()

    async def check_run_id(self) -> None:
        """Makes sure that the store is served for our run id, if for any.

        Raises:
            OtherJobError: it is served for another one.
        """
        served_for = await self.get(SERVED_FOR)
        if served_for is not None and served_for != printable(self._run_id).encode():
            self.is_connected = False
            other = unquote(served_for.decode(errors="replace"), errors="replace")
            raise OtherJobError(
                f"the rendezvous endpoint {self.endpoint} serves run {other}, not {self._run_id}: "
                f"use --rdzv-id {other}, or another endpoint"
            )

    async def get(self, key: str) -> bytes | None:
        """Returns the value of a key, if it has one; only the beginning of a very long one."""
        value: str | None = await self._ask("get", key=key)
        return None if value is None else binascii.a2b_base64(value)

    async def compare_set(self, key: str, expected: bytes, value: bytes) -> bytes:
        """Sets a key to a value if it has the expected one.

        Args:
            key: the key.
            expected: the expected value; empty if the key should not exist.
            value: the new one.

        Returns:
            The present value; empty if the key does not exist.
        """
        answer: str = await self._ask("compare_set", key=key, expected=_encoded(expected), value=_encoded(value))
        now = binascii.a2b_base64(answer)
        # For a key that does not exist but should, torch returns the expected value.
        return b"" if now == expected and now != value else now

    async def aclose(self) -> None:
        """Ends the child, and the store if we serve it."""
        self.is_connected = self.is_serving = False
        self._close_listeners()
        await self._process.aclose()

    async def _ask(self, do: str, *descriptors: int, timeout_s: float | None = None, **arguments: Any) -> Any:
        limit_s = ANSWER_TIMEOUT_S if timeout_s is None else timeout_s
        try:
            value = await self._process.ask(do, *descriptors, timeout_s=limit_s, **arguments)
        except anyio.get_cancelled_exc_class():
            # The caller had no more time.  After a network cut, TCP on this connection needs as long as the cut lasted
            # to find out that it is over; a new connection works at once.
            self.is_connected &= self.is_serving
            raise
        except Refusal as refusal:
            self.is_connected = False
            raise LostError(
                f"lost the connection to the rendezvous endpoint {self.endpoint}: {refusal}",
                reason=f"lost the connection: {refusal}",
            ) from None
        except Death as death:
            self.is_connected = False
            raise self._died(death) from None
        except Unanswered as late:
            if not late.number:
                raise self._is_starting() from None
            await self._on_silence()
            raise RendezvousConnectionError(
                f"no answer from the rendezvous endpoint {self.endpoint} within {limit_s:g} s",
                reason=f"no answer within {limit_s:g} s",
            ) from None
        self._late = 0
        return value

    async def _on_silence(self) -> None:
        self._late += 1
        # Ending the child that serves would end the store, so it gets more time.
        if not self.is_serving or self._late * ANSWER_TIMEOUT_S >= self._read_timeout_s:
            self.is_connected, self._late = False, 0
            await self._process.aclose()

    def _is_starting(self) -> RendezvousError:
        return RendezvousConnectionError(
            "the process for the rendezvous endpoint is still importing torch",
            topic="the-process-for-the-endpoint-died",
        )

    def _died(self, death: Death) -> LostError | InputError:
        if death.is_hopeless and death.code == 1:  # an exception
            return InputError(
                f"the rendezvous needs torch's TCPStore, and {sys.executable} cannot import torch: pip install torch",
                topic="torch-is-not-installed",
            )
        if death.refused:
            return LostError(
                f"the process for the rendezvous endpoint cannot be started: {death.refused}",
                topic="the-process-for-the-endpoint-died",
            )
        what = "served" if self.is_serving else "was connected to"
        return LostError(
            f"the process that {what} the rendezvous endpoint {self.endpoint} died (exit code {death.code})",
            reason=f"the process that {what} it died (exit code {death.code})",
            topic="the-process-for-the-endpoint-died",
        )

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
        self._listeners = ()


def _encoded(value: bytes) -> str:
    return binascii.b2a_base64(value, newline=False).decode()
