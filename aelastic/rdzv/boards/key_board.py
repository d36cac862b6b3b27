"""A board on one key that can be compared and set, and never forgets a leader by itself.

All that is said about a run id is one text (`encoding.py`), changed by compare-and-set only and never deleted.  So of a
renewal and a candidate, or of two candidates, one comes first, and the epoch rises as long as the key lives.
`c10d` keeps it in one store, `quorum` in several, `static` in the memory of the one agent that writes.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from aelastic.errors import RendezvousConnectionError, RendezvousStateError
from aelastic.host.sockets import is_loopback
from aelastic.rdzv.board import Board, Candidate, LeaderRecord
from aelastic.rdzv.boards.encoding import KeyState, state_of, text_of, text_without_leader
from aelastic.rdzv.boards.endpoints import Endpoint, GoneError, first_of, look_up_limit_s, useful_elsewhere
from aelastic.rdzv.boards.tcp_store import NoStoreError, OtherJobError, TcpStore, run_key
from aelastic.rdzv.boards.writing import Writing
from aelastic.rdzv.secret.secret_file import SecretFile
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.tcpstore.child import Fork

_log = logging.getLogger(__name__)

T = TypeVar("T")

# Only a coordinator and candidates write, rarely.
TRIES_MAX = 20
# No agent of this job finds a board where one of these is raised.
_NO_BOARD = (GoneError, OtherJobError, NoStoreError)


class KeyBoard(Board):
    """One run id in one key.

    Args:
        writing: how its agents write.
    """

    def __init__(self, writing: Writing) -> None:
        self._writing = writing

    _last = KeyState(b"")  # what we wrote last
    _has_led = False  # this agent's record was there

    @abstractmethod
    async def _reach(self, *, may_serve: bool) -> None:
        """Makes sure that there is a connection, if it can."""

    @abstractmethod
    async def _get(self) -> bytes:
        """The text; empty where there is none."""

    @abstractmethod
    async def _compare_set(self, expected: bytes, text: bytes) -> bytes:
        """Replaces the text if it is the expected one; gives what it is then."""

    @abstractmethod
    async def _check_run_id(self) -> None:
        """Makes sure that this is no other job's store; the agent that serves it may have said so too late."""

    @abstractmethod
    async def _insist(self, do: Callable[[], Awaitable[T]]) -> T:
        """Does something, again if the connection is lost meanwhile."""

    @property
    @abstractmethod
    def _where(self) -> str:
        """The key and where it is, for messages."""

    async def open(self) -> None:
        """Serves the store if this agent can, else becomes its client; never waits for another agent to serve it."""
        await self._reach(may_serve=True)

    async def read(self) -> LeaderRecord | None:
        return await self._insist(self._read)

    async def _read(self) -> LeaderRecord | None:
        await self.open()
        state = await self._look()
        if state.record is None:
            await self._check_run_id()
        if state.is_foreign:
            self._writing.stand_by(state.text, self._where, lambda text: state_of(text).record)
        return state.record

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        return await self._insist(lambda: self._campaign(candidate, seen, above))

    async def _campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        await self.open()
        await self._check_run_id()
        state = await self._look()
        if state.record != seen:
            return state.record
        if state.is_foreign:
            self._writing.stand_by(state.text, self._where, lambda text: state_of(text).record)
        epoch = candidate.epoch_after(above, state.epoch)
        record = LeaderRecord(epoch=epoch, candidate=candidate, renewals=0, seats=state.seats)
        state = self._state_of(await self._compare_set(state.text, self._writing.sign(text_of(record))))
        self._last = state
        self._has_led |= record.is_same_term(state.record)
        return state.record

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        try:
            return await self._insist(lambda: self._renew(record))
        except _NO_BOARD:
            return record.renewed()

    async def _renew(self, record: LeaderRecord) -> LeaderRecord | None:
        await self.open()
        # A renewal that was not answered may have taken effect: to write the same count again would renew nothing.
        last, self._last = self._last, KeyState(b"")
        state = last if record.is_same_term(last.record) else self._seen_by_leader(await self._get())
        if record.is_elected and state.record is not None and state.record.is_first and state.epoch > record.epoch:
            return state.record
        is_ours = await self._change(state, record, lambda now: text_of(now.renewed().replace(seats=record.seats)))
        return self._last.record if is_ours else None

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        await self._reach(may_serve=False)
        over = lambda now: text_of(now.replace(verdict=verdict, seats=None))  # noqa: E731
        return await self._change(self._seen_by_leader(await self._get()), record, over)

    async def resign(self, record: LeaderRecord) -> None:
        await self._reach(may_serve=False)
        without = lambda now: text_without_leader(now.replace(seats=record.seats))  # noqa: E731
        await self._change(self._seen_by_leader(await self._get()), record, without)

    async def _look(self) -> KeyState:
        return self._state_of(await self._get())

    async def _change(self, state: KeyState, record: LeaderRecord, new_text: Callable[[LeaderRecord], bytes]) -> bool:
        """Replaces our record in the store, if it is still there.

        A store without the key is a new one, since nothing is ever deleted: then this agent was the last leader, and
        goes on.
        """
        for _ in range(TRIES_MAX):
            # What it knew before an election without it; what no agent of this job has written; or what an earlier one
            # had, which somebody has given it back.
            may_be_older = record.is_elected or self._writing.is_proved
            is_older = state.is_foreign or (may_be_older and state.epoch < record.epoch)
            if state.text and not record.is_same_term(state.record) and not is_older:
                return False
            if not state.text:
                _log.warning("the TCPStore of %s was restarted and is empty: the leader registers again", self.name)
            text = self._writing.sign(new_text(record if is_older or state.record is None else state.record))
            state = self._seen_by_leader(await self._compare_set(state.text, text))
            if state.text == text:
                self._last, self._has_led = state, True
                return True
        raise RendezvousConnectionError(
            f"{self.name}: too many conflicting writes to {self._where}", topic="the-record-at-the-endpoint-is-not-ours"
        )

    def _seen_by_leader(self, text: bytes) -> KeyState:
        """What the text says; nothing if another program has written it over the record of this agent."""
        try:
            return self._state_of(text)
        except RendezvousStateError:
            if not self._has_led:
                raise
            _log.warning(
                "%s: another program wrote over the record of this leader: registering it again",
                self._where,
                extra={"topic": "the-store-was-restarted"},
            )
            return KeyState(text, is_foreign=True)

    def _state_of(self, text: bytes) -> KeyState:
        verified = self._writing.verify(text, self._where)
        try:
            return KeyState(text, is_foreign=True) if verified is None else state_of(verified).replace(text=text)
        except ValueError as error:
            raise RendezvousStateError(
                f"{self._where} was not written by an aelastic agent ({error}): "
                "choose another run id, or another endpoint"
            ) from None


class OneStoreBoard(KeyBoard):
    """One run id in the key of one TCPStore.

    Args:
        endpoint: where the store is.
        settings: `backend`, `lease_s`, and `read_timeout` of `config`.
        run_id: the job's name.
        env: the environment of the child process.
        secret: of the job, if it has one.
        fork: as `StoreProcess` takes it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        settings: RendezvousSettings,
        run_id: str,
        env: Mapping[str, str],
        secret: SecretFile | None,
        fork: Fork | None = None,
    ) -> None:
        super().__init__(Writing(secret, settings.lease_s))
        self._backend = settings.backend
        self._is_on_loopback = settings.is_on_loopback and is_loopback(endpoint.host)
        self._look_up_s = look_up_limit_s(settings.lease_s)
        self._store = TcpStore(endpoint, run_id, env, settings.read_timeout_s, fork, self._look_up_s)
        self._key = run_key(run_id, "leader")
        self._local_addresses: list[str] = []  # of the endpoint, if that is this machine

    @property
    def _local_address(self) -> str | None:
        return first_of(self._local_addresses)

    @property
    def _is_here(self) -> bool:
        """Whether this agent serves the store."""
        return self._store.is_serving

    async def _get(self) -> bytes:
        return await self._store.get(self._key) or b""

    async def _compare_set(self, expected: bytes, text: bytes) -> bytes:
        return await self._store.compare_set(self._key, expected, text)

    async def _check_run_id(self) -> None:
        await self._store.check_run_id()

    async def _insist(self, do: Callable[[], Awaitable[T]]) -> T:
        return await self._store.insist(do)

    @property
    def _where(self) -> str:
        return f"key {self._key} at {self._store.endpoint}"

    async def aclose(self) -> None:
        await self._store.aclose()

    @property
    def name(self) -> str:
        return f"{self._backend} at {self._store.endpoint}"

    @property
    def own_address(self) -> str:
        return useful_elsewhere(self._local_address or "") if self._is_here else self._store.own_address

    @property
    def endpoint_host(self) -> str:
        return self._store.endpoint.host if self._is_here or self._local_address is not None else ""
