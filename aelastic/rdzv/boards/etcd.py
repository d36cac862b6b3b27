"""The boards `etcd`, `etcd-v3` and `etcd-v2`: a key with a lease, by whichever of its two APIs an etcd serves.

    <prefix>/<run id>/coordinator   the leader record, under a lease: it vanishes with its coordinator
    <prefix>/+epoch                 the highest epoch that is not of etcd's own making; mostly there is none

The epoch always rises because etcd's revision (in v2: its index) does, which outlives the key: it is the revision at
which the key was made, or one above that at which it was last overwritten.  Only where an agent has seen a higher one
(etcd's data was lost meanwhile) does the second key keep it.
"""

from __future__ import annotations

import logging
from contextlib import AsyncExitStack

from aelastic.errors import RendezvousConnectionError, RendezvousStateError
from aelastic.rdzv.board import Board, Candidate, LeaderRecord
from aelastic.rdzv.boards.encoding import record_from_bytes, record_to_bytes
from aelastic.rdzv.boards.etcd_http import Entry, EtcdClient, NoSuchApiError
from aelastic.rdzv.boards.etcd_v2 import EtcdV2
from aelastic.rdzv.boards.etcd_v3 import EtcdV3
from aelastic.rdzv.boards.writing import Writing
from aelastic.rdzv.secret.secret_file import SecretFile
from aelastic.rdzv.settings import RendezvousSettings

_log = logging.getLogger(__name__)

# How often others may write between our read and our write: each time one of them gets ahead.
MAX_LOOKS = 20
# By back end; of several the first that the server has, asked once.
APIS: dict[str, tuple[type[EtcdClient], ...]] = {"etcd": (EtcdV3, EtcdV2), "etcd-v3": (EtcdV3,), "etcd-v2": (EtcdV2,)}


class EtcdBoard(Board):
    """A run id on an etcd, as one agent uses it.

    Args:
        settings: `backend`, `endpoint`, `lease_s`, and of `config` what `etcd_settings.py` says.
        run_id: any text.
        secret: of the job, if it has one.

    Raises:
        InputError: a setting that cannot work.
    """

    def __init__(self, settings: RendezvousSettings, run_id: str, secret: SecretFile | None = None) -> None:
        self._writing = Writing(secret, settings.lease_s)
        self._clients = [api(settings) for api in APIS[settings.backend]]
        self._etcd = self._clients[0]
        self._is_chosen = len(self._clients) == 1
        self._backend = settings.backend
        self._has_led = False
        self._key, self._floor_key = self._etcd.settings.key(run_id), self._etcd.settings.floor_key

    async def open(self) -> None:
        without: NoSuchApiError | None = None
        for client in [self._etcd] if self._is_chosen else self._clients:
            try:
                self._etcd = client
                await self.read()
            except NoSuchApiError as error:
                without = without or error
                self._etcd = self._clients[0]
            else:
                self._is_chosen = True
                return
        assert without is not None
        raise without

    async def text(self) -> bytes:
        """What the key holds, whoever wrote it."""
        return (await self._etcd.get(self._key)).value

    async def read(self) -> LeaderRecord | None:
        with self._etcd.within_lease():
            entry, now = await self._look()
            self._stand_by(entry, now)
            return now

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        with self._etcd.within_lease():
            for _ in range(MAX_LOOKS):
                entry, now = await self._look()
                if now != seen:
                    return now
                self._stand_by(entry, now)
                floor = await self._etcd.get(self._floor_key)
                known = max(self._epoch_of(floor), now.epoch if now else 0)
                epoch = max(candidate.epoch_after(above, known), entry.revision + 1)
                raised = str(epoch).encode() if epoch > entry.revision + 1 else None
                value = self._bytes_of(LeaderRecord(epoch=epoch, candidate=candidate))
                written = await self._etcd.claim(self._key, entry, value, (self._floor_key, floor, raised))
                if written is not None:
                    self._has_led = True
                    return self._record_of(written)
        raise self._conflict()

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        with self._etcd.within_lease():
            entry, now = await self._look_as_leader()
            if entry.value and now is None:
                return await self._write_again(record, entry)
            if not record.is_same_term(now):
                return None
            if await self._etcd.keep(self._key, entry):
                return now
            # Written meanwhile: by us, if the record is still ours; then only the answer was lost.
            _, now = await self._look()
            return now if record.is_same_term(now) else None

    async def _write_again(self, record: LeaderRecord, entry: Entry) -> LeaderRecord | None:
        """Writes a record again that another program has overwritten."""
        floor = self._floor_key, await self._etcd.get(self._floor_key), None
        written = await self._etcd.claim(self._key, entry, self._bytes_of(record), floor)
        now = None if written is None else self._record_of(written)
        return now if record.is_same_term(now) else None

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        with self._etcd.within_lease():
            for _ in range(MAX_LOOKS):
                entry, now = await self._look_as_leader()
                if entry.value and now is None:
                    await self._write_again(record, entry)
                    continue
                if now is None or not record.is_same_term(now):
                    return False
                if now.verdict == verdict:
                    return True  # written before, and the answer was lost
                if await self._etcd.amend(self._key, entry, self._bytes_of(record.replace(verdict=verdict))):
                    return True
        raise self._conflict()

    async def resign(self, record: LeaderRecord) -> None:
        with self._etcd.within_lease():
            for _ in range(MAX_LOOKS):
                entry, now = await self._look_as_leader()
                if not record.is_same_term(now) or await self._etcd.forget(self._key, entry):
                    return
        raise self._conflict()

    async def aclose(self) -> None:
        async with AsyncExitStack() as stack:
            for client in self._clients:
                stack.push_async_callback(client.aclose)

    @property
    def name(self) -> str:
        return self._etcd.name if self._is_chosen else f"{self._backend} at {self._etcd.at}"

    @property
    def own_address(self) -> str:
        return self._etcd.own_address

    @property
    def endpoint_host(self) -> str:
        return self._etcd.endpoint_host

    async def _look(self) -> tuple[Entry, LeaderRecord | None]:
        entry = await self._etcd.get(self._key)
        return entry, self._record_of(entry) if entry.modified else None

    async def _look_as_leader(self) -> tuple[Entry, LeaderRecord | None]:
        """As `_look`; there is no record where another program has written over that of this agent."""
        entry = await self._etcd.get(self._key)
        try:
            return entry, self._record_of(entry) if entry.modified else None
        except RendezvousStateError:
            if not self._has_led:
                raise
            _log.warning(
                "%s: another program wrote over the record of this leader: registering it again",
                self._where,
                extra={"topic": "the-store-was-restarted"},
            )
            return entry, None

    @property
    def _where(self) -> str:
        return f"{self.name}: key {self._key}"

    def _stand_by(self, entry: Entry, now: LeaderRecord | None) -> None:
        if entry.value and now is None:
            self._writing.stand_by(entry.value, self._where, record_from_bytes)

    def _record_of(self, entry: Entry) -> LeaderRecord | None:
        """`None`: no agent of this job wrote it."""
        verified = self._writing.verify(entry.value, self._where)
        if verified is None:
            return None
        try:
            record = record_from_bytes(verified if entry.lease else b"")
        except ValueError as error:
            reason = error if entry.lease else "it has no lease"
            raise RendezvousStateError(
                f"{self.name}: key {self._key} was not written by an aelastic agent ({reason}): "
                "delete it, or use another run id"
            ) from None
        # Of two agents that both saw no leader, the later one may have read before the earlier one's record came and
        # went, and so wrote the same epoch.  But it wrote at a higher revision.
        return record.replace(epoch=max(record.epoch, entry.made))

    def _epoch_of(self, floor: Entry) -> int:
        try:
            return int(floor.value or b"0")
        except ValueError:
            raise RendezvousStateError(f"{self.name}: key {self._floor_key} is not a number: delete it") from None

    def _conflict(self) -> RendezvousConnectionError:
        return RendezvousConnectionError(
            f"{self.name}: too many conflicting writes to {self._key}", topic="the-record-at-the-endpoint-is-not-ours"
        )

    def _bytes_of(self, record: LeaderRecord) -> bytes:
        try:
            return self._writing.sign(record_to_bytes(record))
        except ValueError as error:
            raise RendezvousStateError(f"the leader record cannot be written: {error}") from None
