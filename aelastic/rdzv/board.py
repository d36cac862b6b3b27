"""The board: where the agents of a job find their leader, and elect one.

It keeps one text in a store (`stores/store.py`), which names the leader and counts how often that has renewed its
leadership.  The text is changed by compare-and-set only, and never deleted: of a renewal and a candidate, or of two
candidates, one comes first, and the epoch rises as long as the store lives.  A leader is gone when its count stands
still; `member/` decides when to use which operation.

An operation takes a few round trips and may be cancelled at any moment, in which case it has taken effect or not.  It
raises what `Store` raises, and `NotTrustedError` while a record with another secret may be that of a living leader.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from aelastic.errors import RendezvousConnectionError, RendezvousStateError
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.record_text import CellState, OlderVersionError, state_of, text_of, text_without_leader
from aelastic.rdzv.secret.secret_file import SecretFile
from aelastic.rdzv.stores.store import NoStoreForJob, Store
from aelastic.rdzv.writing import Writing

_log = logging.getLogger(__name__)

# Only a leader and candidates write, rarely.
TRIES_MAX = 20
_UNKNOWN = CellState(b"")


class Board:
    """One run id, as one agent uses it.  At most one operation runs at a time.

    Args:
        store: keeps the text.
        secret: of the job, if it has one; proves what its agents write.
        lease_s: as `RendezvousSettings.lease_s`.
    """

    def __init__(self, store: Store, secret: SecretFile | None, lease_s: float) -> None:
        self._store = store
        self._writing = Writing(secret, lease_s)
        self._last = _UNKNOWN  # what this agent has written last
        self._has_led = False  # its record was there

    async def run(self) -> None:
        """Runs until cancelled, or returns at once; operations wait for it."""
        await self._store.run()

    async def open(self) -> None:
        """Connects to the store, or serves it.  Called again after a failed `read` or `campaign`."""
        await self._store.open()

    async def read(self) -> LeaderRecord | None:
        """Returns the leader record, or `None` if no agent leads."""
        return self._trusted(self._state_of(await self._store.get())).record

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        """Makes `candidate` the leader, unless another agent came first.

        Args:
            candidate: this agent.
            seen: the result of the last `read`.  If the board has changed since, nothing is written.
            above: the new epoch must be higher than this one, and than every earlier one of this board.

        Returns:
            The current leader record, of this agent or another; `None` if this agent may not lead.
        """
        state = self._state_of(await self._store.get())
        if state.record != seen:
            return state.record
        self._trusted(state)
        epoch = candidate.epoch_after(above, state.epoch)
        record = LeaderRecord(epoch=epoch, candidate=candidate, renewals=0, seats=state.seats)
        self._last = state = self._state_of(await self._store.compare_set(state.text, self._text(text_of, record)))
        if state.is_foreign:
            raise self._writing.distrust(state.text, self._store.where)
        self._has_led |= record.is_same_term(state.record)
        return state.record

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        """Renews this agent's leadership.  Called a few times per lease.

        Args:
            record: this agent's record, from the last operation, with the round that the board should know from now on.

        Returns:
            This agent's record as it is on the board now; `None` if another agent leads.  If the nodes of a round
            elected this agent, and another agent leads that did not know the job (`is_first`), that agent's record.  If
            no agent of this job can use the store, none can be elected there: then the record, with the renewal
            counted here.
        """
        # A renewal that was not answered may have taken effect: to write the same count again would renew nothing.
        state, self._last = self._written(record), _UNKNOWN
        try:
            if state is _UNKNOWN:
                state = self._seen_by_leader(await self._store.get())
            rival = state.record
            if record.is_elected and rival is not None and rival.is_first and rival.epoch > record.epoch:
                return rival
            is_ours = await self._change(state, record, lambda now: text_of(now.renewed().replace(seats=record.seats)))
        except NoStoreForJob:
            return record.renewed()
        return self._last.record if is_ours else None

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        """Writes the verdict into this agent's record, for nodes that will not get it from this leader.

        Returns:
            Whether this agent was still the leader.
        """
        over = lambda now: text_of(now.replace(verdict=verdict, seats=None))  # noqa: E731
        return await self._change(self._written(record), record, over)

    async def resign(self, record: LeaderRecord) -> None:
        """Gives up the leadership, so that no node waits for the lease to end; the board keeps the round."""
        without = lambda now: text_without_leader(now.replace(seats=record.seats))  # noqa: E731
        await self._change(self._written(record), record, without)

    async def aclose(self) -> None:
        """Releases everything, including the store if this agent serves it."""
        await self._store.aclose()

    @property
    def name(self) -> str:
        """Back end and endpoint, for messages: `c10d at node0:29400`."""
        return self._store.name

    @property
    def own_address(self) -> str:
        """This agent's address on its connection to the store, which other nodes may use; empty if unknown."""
        return self._store.own_address

    @property
    def endpoint_host(self) -> str:
        """The host of the store, as the user wrote it, if it is this machine; otherwise empty."""
        return self._store.endpoint_host

    @property
    def is_served_here(self) -> bool:
        """Whether the board is lost when this agent ends."""
        return self._store.is_served_here

    def _written(self, record: LeaderRecord) -> CellState:
        """What this agent wrote last, if that was in this term."""
        return self._last if record.is_same_term(self._last.record) else _UNKNOWN

    async def _change(self, state: CellState, record: LeaderRecord, new_text: Callable[[LeaderRecord], bytes]) -> bool:
        """Replaces our record in the store, if it is still there.

        A store without the text is a new one, since nothing is ever deleted: then this agent was the last leader, and
        continues.

        Args:
            state: what is there as far as this agent knows.
            record: of this agent's term.
            new_text: makes the new text, from our record as the store has it.
        """
        for _ in range(TRIES_MAX):
            # It knew this before an election without it; no agent of this job has written it; or an earlier one has,
            # and somebody has put it back.
            may_be_older = record.is_elected or self._writing.is_proved
            is_older = state.is_foreign or (may_be_older and state.epoch < record.epoch)
            if state.text and not record.is_same_term(state.record) and not is_older:
                return False
            text = self._text(new_text, record if is_older or state.record is None else state.record)
            before, state = state, self._seen_by_leader(await self._store.compare_set(state.text, text))
            if state.text == text:
                if not before.text:
                    _log.warning("%s was restarted and is empty: the leader registers again", self.name)
                self._last, self._has_led = state, True
                return True
        raise RendezvousConnectionError(
            f"too many conflicting writes to {self._store.where}", topic="the-record-at-the-endpoint-is-not-ours"
        )

    def _text(self, new_text: Callable[[LeaderRecord], bytes], record: LeaderRecord) -> bytes:
        try:
            return self._writing.sign(new_text(record))
        except ValueError as error:
            raise RendezvousStateError(f"the leader record cannot be written: {error}") from None

    def _trusted(self, state: CellState) -> CellState:
        """Leaves a text that no agent of this job wrote alone for a lease."""
        if state.is_foreign and not self._writing.has_stood_still(state.text):
            raise self._writing.distrust(state.text, self._store.where)
        return state

    def _seen_by_leader(self, text: bytes) -> CellState:
        """What the text says; nothing if another program has written it over the record of this agent."""
        try:
            return self._state_of(text)
        except RendezvousStateError:
            if not self._has_led:
                raise
            _log.warning(
                "%s: another program wrote over the record of this leader: registering it again",
                self._store.where,
                extra={"topic": "the-store-was-restarted"},
            )
            return CellState(text, is_foreign=True)

    def _state_of(self, text: bytes) -> CellState:
        verified = self._writing.verify(text, self._store.where)
        if verified is None:
            return CellState(text, is_foreign=True)
        try:
            return state_of(verified).replace(text=text)
        except OlderVersionError:
            raise RendezvousStateError(
                f"{self._store.where} was written by an older version of aelastic: use one version on all nodes, or "
                "another run id"
            ) from None
        except ValueError as error:
            raise RendezvousStateError(
                f"{self._store.where} was not written by an aelastic agent ({error}): choose another run id, or "
                "another endpoint"
            ) from None
