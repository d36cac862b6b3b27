"""The board `etcd-v3`: a leased key on etcd 3.4 or newer, through the JSON gateway that every such etcd serves.

    <prefix>/<run id>/coordinator   the leader record, under a lease: it vanishes with its coordinator
    <prefix>/+epoch                 the highest epoch that is not of etcd's own making; mostly there is none

The epoch always rises because etcd's revision does, which outlives the key: it is the revision at which the key was
made, or one above that at which it was last overwritten.  Only where an agent has seen a higher one (etcd's data was
lost meanwhile) does the second key keep it.
"""

from __future__ import annotations

import math
import secrets
from base64 import b64decode, b64encode

from aelastic.core.record import Record
from aelastic.errors import RendezvousConnectionError, RendezvousStateError
from aelastic.rdzv.board import Candidate, LeaderRecord
from aelastic.rdzv.boards.encoding import record_from_bytes, record_to_bytes
from aelastic.rdzv.boards.etcd_http import HttpBoard
from aelastic.rdzv.boards.etcd_v3_calls import (
    FAILED_PRECONDITION,
    NOT_FOUND,
    EtcdV3Calls,
    JsonObject,
    part_of,
    to_base64,
)
from aelastic.rdzv.settings import RendezvousSettings

# How often others may write between our read and our write: each time one of them gets ahead.
MAX_LOOKS = 20


class _Seen(Record):
    """What etcd has under our key, at one revision."""

    record: LeaderRecord | None
    revision: int  # of etcd
    modified: int = 0  # revision of the last write to the record; 0: there is none
    lease: int = 0


class _Floor(Record):
    """The key that holds the highest epoch not of etcd's making; 0 if there is none."""

    epoch: int
    modified: int


class EtcdV3Board(HttpBoard):
    """A run id on an etcd, as one agent uses it.

    Args:
        settings: `endpoint`, `lease_s`, and of `config` what `etcd_settings.py` says.
        run_id: any text.

    Raises:
        InputError: a setting that cannot work.
    """

    def __init__(self, settings: RendezvousSettings, run_id: str) -> None:
        self._etcd = EtcdV3Calls(settings)
        self._http = self._etcd.http
        self._key = self._http.settings.key(run_id)
        self._ttl_s = math.ceil(settings.lease_s)

    async def open(self) -> None:
        await self.read()

    async def read(self) -> LeaderRecord | None:
        with self._http.within_lease():
            return (await self._look()).record

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        with self._http.within_lease():
            for _ in range(MAX_LOOKS):
                now = await self._look()
                if now.record != seen:
                    return now.record
                if (record := await self._write_candidate(candidate, now, above)) is not None:
                    return record
        raise RendezvousConnectionError(f"{self.name}: too many conflicting writes to {self._key}")

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        with self._http.within_lease():
            now = await self._look()
            if not record.is_same_term(now.record):
                return None
            answer = await self._etcd.call("lease/keepalive", {"ID": str(now.lease)}, or_no=NOT_FOUND) or {}
            return now.record if self._etcd.number(part_of(answer, "result"), "TTL") > 0 else None

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        with self._http.within_lease():
            for _ in range(MAX_LOOKS):
                now = await self._look()
                if now.record is None or not record.is_same_term(now.record):
                    return False
                if now.record.verdict == verdict:
                    return True  # written before, and the answer was lost
                closed = record.replace(verdict=verdict)
                if await self._write(now, [self._put(self._key, _bytes_of(closed), now.lease)]):
                    return True
        raise RendezvousConnectionError(f"{self.name}: too many conflicting writes to {self._key}")

    async def resign(self, record: LeaderRecord) -> None:
        with self._http.within_lease():
            now = await self._look()
            if record.is_same_term(now.record):
                # The key goes with the lease; should it be another's by now, it is under another lease.
                await self._etcd.call("lease/revoke", {"ID": str(now.lease)}, or_no=NOT_FOUND)

    async def _look(self) -> _Seen:
        kv, revision = await self._get(self._key)
        return self._seen(kv, revision) if kv else _Seen(record=None, revision=revision)

    async def _floor(self) -> _Floor:
        """The highest epoch that is not of etcd's own making.  What changes meanwhile is found by the write."""
        key = self._http.settings.floor_key
        kv, _ = await self._get(key)
        try:
            epoch = int(b64decode(kv["value"])) if kv else 0
        except (LookupError, TypeError, ValueError):
            raise RendezvousStateError(f"{self.name}: key {key} is no number: delete it") from None
        return _Floor(epoch, self._etcd.number(kv, "mod_revision"))

    async def _get(self, key: str) -> tuple[JsonObject, int]:
        """A key as etcd has it, empty if there is none, and etcd's revision."""
        answer = await self._etcd.call("kv/range", {"key": to_base64(key)}) or {}
        kvs = answer.get("kvs") or [{}]
        revision = self._etcd.number(part_of(answer, "header"), "revision")
        if not (revision and isinstance(kvs, list) and isinstance(kvs[0], dict)):
            raise RendezvousStateError(f"{self.name} gave an unexpected answer to kv/range; is this etcd?")
        return kvs[0], revision

    def _seen(self, kv: JsonObject, revision: int) -> _Seen:
        lease = self._etcd.number(kv, "lease")
        try:
            record = record_from_bytes(b64decode(kv.get("value", "")) if lease else b"")
        except (TypeError, ValueError) as error:
            reason = error if lease else "it has no lease"
            raise RendezvousStateError(
                f"{self.name}: key {self._key} was not written by an aelastic agent ({reason}): "
                "delete it, or use another run id"
            ) from None
        # Of two agents that both saw no leader, the later one may have read before the earlier one's record came and
        # went, and so wrote the same epoch.  But it wrote at a higher revision.
        made = self._etcd.number(kv, "create_revision")
        record = record.replace(epoch=max(record.epoch, made))
        return _Seen(record, revision, modified=self._etcd.number(kv, "mod_revision"), lease=lease)

    async def _write_candidate(self, candidate: Candidate, now: _Seen, above: int) -> LeaderRecord | None:
        """The record of `candidate`; `None` if another agent wrote since the read."""
        floor = await self._floor()
        known = max(floor.epoch, now.record.epoch if now.record else 0)
        epoch = max(candidate.epoch_after(above, known), now.revision + 1)
        lease = secrets.randbelow(2**63 - 1) + 1  # ours to choose, so that asking twice makes one
        # "Lease already exists" says that we were granted it, and the answer was lost.
        await self._etcd.call("lease/grant", {"ID": str(lease), "TTL": str(self._ttl_s)}, or_no=FAILED_PRECONDITION)
        puts = [self._put(self._key, _bytes_of(LeaderRecord(epoch=epoch, candidate=candidate)), lease)]
        if epoch > now.revision + 1:
            puts.append(self._put(self._http.settings.floor_key, str(epoch).encode()))
        if not (written := await self._write(now, puts, floor)):
            return None
        return LeaderRecord(epoch=epoch if now.record else max(epoch, written), candidate=candidate)

    async def _write(self, now: _Seen, puts: list[JsonObject], floor: _Floor | None = None) -> int:
        """Writes if no other agent has since the read; gives the revision, 0 if one has."""
        compared = [(self._key, now.modified)]
        if floor is not None:
            compared.append((self._http.settings.floor_key, floor.modified))
        compare = [
            {"key": to_base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
            for key, revision in compared
        ]
        # Not found is a lease that has ended meanwhile.
        answer = await self._etcd.call("kv/txn", {"compare": compare, "success": puts}, or_no=NOT_FOUND) or {}
        return self._etcd.number(part_of(answer, "header"), "revision") if answer.get("succeeded") is True else 0

    @staticmethod
    def _put(key: str, value: bytes, lease: int = 0) -> JsonObject:
        return {"request_put": {"key": to_base64(key), "value": b64encode(value).decode(), "lease": str(lease)}}


def _bytes_of(record: LeaderRecord) -> bytes:
    try:
        return record_to_bytes(record)
    except ValueError as error:
        raise RendezvousStateError(f"the leader record cannot be written: {error}") from None
