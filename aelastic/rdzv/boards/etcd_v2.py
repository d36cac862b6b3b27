"""The board `etcd-v2`: a key with a time to live, through the v2 API that etcd up to 3.5 serves with `--enable-v2`.

    <prefix>/<run id>/coordinator   the leader record, with a time to live: it vanishes with its coordinator
    <prefix>/+epoch                 the highest epoch that is not of etcd's own making; mostly there is none

The epoch always rises because etcd's index does, which outlives the key: it is the index at which the key was
made, or one above that at which it was last overwritten.  Only where an agent has seen a higher one (etcd's data was
lost meanwhile) does the second key keep it.

Every write names the index that it replaces.  A renewal counts as a write, but changes neither the value nor the
index at which it was made.  Reads go through the cluster's quorum: a member may be behind.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from aelastic.core.record import Record
from aelastic.errors import InputError, RendezvousConnectionError, RendezvousStateError
from aelastic.rdzv.board import Candidate, LeaderRecord
from aelastic.rdzv.boards.encoding import record_from_bytes, record_to_bytes
from aelastic.rdzv.boards.etcd_http import Answer, Elsewhere, EtcdHttp, HttpBoard, NotUnderstood
from aelastic.rdzv.settings import RendezvousSettings

# Documentation/v2/errorcode.md of etcd 3.4.
KEY_NOT_FOUND, COMPARE_FAILED, KEY_EXISTS, UNAUTHORIZED = 100, 101, 105, 110
ANOTHER_WAS_FASTER = {KEY_NOT_FOUND, COMPARE_FAILED, KEY_EXISTS}
# How often others may write between our read and our write: each time one of them gets ahead.
MAX_LOOKS = 20


class _Refusal(Exception):
    """etcd understood, and says no."""

    def __init__(self, code: int, index: int, message: str) -> None:
        self.code, self.index, self.message = code, index, message
        super().__init__(code, index, message)


class _Node(Record):
    """What etcd has under a key."""

    index: int  # of etcd
    value: str = ""
    made: int = 0
    modified: int = 0  # 0: there is no such key
    is_mortal: bool = False  # has a time to live

    @property
    def replaced_by(self) -> str:
        """The condition of a write that replaces just this."""
        return f"prevIndex={self.modified}" if self.modified else "prevExist=false"


class EtcdV2Board(HttpBoard):
    """A run id on an etcd, as one agent uses it.

    Args:
        settings: `endpoint`, `lease_s`, and of `config` what `etcd_settings.py` says.
        run_id: any text.

    Raises:
        InputError: a setting that cannot work.
    """

    def __init__(self, settings: RendezvousSettings, run_id: str) -> None:
        self._http = EtcdHttp(
            settings, "etcd-v2", "does not serve the v2 API: use the back end etcd-v3, or start it with --enable-v2"
        )
        self._key = self._http.settings.key(run_id)
        self._ttl_s = math.ceil(settings.lease_s)

    async def open(self) -> None:
        await self.read()

    async def read(self) -> LeaderRecord | None:
        with self._http.within_lease():
            return (await self._look())[1]

    async def campaign(self, candidate: Candidate, seen: LeaderRecord | None, above: int) -> LeaderRecord | None:
        with self._http.within_lease():
            for _ in range(MAX_LOOKS):
                node, now = await self._look()
                if now != seen:
                    return now
                floor = await self._get(self._http.settings.floor_key)
                known = max(self._floor(floor), now.epoch if now else 0)
                epoch = max(candidate.epoch_after(above, known), node.index + 1)
                if epoch > node.index + 1 and await self._put(self._http.settings.floor_key, floor, str(epoch)) is None:
                    continue
                written = await self._put_record(node, LeaderRecord(epoch=epoch, candidate=candidate))
                if written is not None:
                    return self._record_of(written)
        raise RendezvousConnectionError(f"{self.name}: too many conflicting writes to {self._key}")

    async def renew(self, record: LeaderRecord) -> LeaderRecord | None:
        with self._http.within_lease():
            node, now = await self._look()
            if not record.is_same_term(now):
                return None
            form = {"ttl": str(self._ttl_s), "refresh": "true"}
            if await self._ask("PUT", self._key, node.replaced_by, form) is not None:
                return now
            # Written meanwhile: by us, if the record is still ours; then only the answer was lost.
            _, now = await self._look()
            return now if record.is_same_term(now) else None

    async def publish(self, record: LeaderRecord, verdict: str) -> bool:
        with self._http.within_lease():
            for _ in range(MAX_LOOKS):
                node, now = await self._look()
                if now is None or not record.is_same_term(now):
                    return False
                if now.verdict == verdict:
                    return True  # written before, and the answer was lost
                closed = record.replace(verdict=verdict)
                if await self._put_record(node, closed) is not None:
                    return True
        raise RendezvousConnectionError(f"{self.name}: too many conflicting writes to {self._key}")

    async def resign(self, record: LeaderRecord) -> None:
        with self._http.within_lease():
            for _ in range(MAX_LOOKS):
                node, now = await self._look()
                if not record.is_same_term(now):
                    return
                if await self._ask("DELETE", self._key, node.replaced_by) is not None:
                    return
        raise RendezvousConnectionError(f"{self.name}: too many conflicting writes to {self._key}")

    async def _look(self) -> tuple[_Node, LeaderRecord | None]:
        node = await self._get(self._key)
        return node, self._record_of(node) if node.modified else None

    def _record_of(self, node: _Node) -> LeaderRecord:
        try:
            record = record_from_bytes(node.value.encode(errors="surrogatepass") if node.is_mortal else b"")
        except ValueError as error:
            reason = error if node.is_mortal else "it has no lease"
            raise RendezvousStateError(
                f"{self.name}: key {self._key} was not written by an aelastic agent ({reason}): "
                "delete it, or use another run id"
            ) from None
        # Of two agents that both saw no leader, the later one may have read before the earlier one's record came and
        # went, and so wrote the same epoch.  But it wrote at a higher index.
        return record.replace(epoch=max(record.epoch, node.made))

    def _floor(self, node: _Node) -> int:
        try:
            return int(node.value or "0")
        except ValueError:
            key = self._http.settings.floor_key
            raise RendezvousStateError(
                f"{self.name}: key {key} was not written by an aelastic agent: delete it"
            ) from None

    async def _put_record(self, node: _Node, record: LeaderRecord) -> _Node | None:
        try:
            text = record_to_bytes(record).decode()
        except ValueError as error:
            raise RendezvousStateError(f"the leader record cannot be written: {error}") from None
        return await self._put(self._key, node, text, ttl=str(self._ttl_s))

    async def _put(self, key: str, replaced: _Node, value: str, **form: str) -> _Node | None:
        """What is written now; `None` if another agent wrote since the read."""
        return await self._ask("PUT", key, replaced.replaced_by, {"value": value, **form})

    async def _get(self, key: str) -> _Node:
        node = await self._ask("GET", key, "quorum=true", understand=_understand_read)
        assert node is not None  # no write gets ahead of a read
        return node

    async def _ask(
        self,
        method: str,
        key: str,
        query: str,
        form: dict[str, str] | None = None,
        understand: Callable[[Answer], _Node] | None = None,
    ) -> _Node | None:
        """The node that etcd answers with; `None` if another agent wrote since the read."""
        settings = self._http.settings
        headers = {}
        if settings.user:
            headers["Authorization"] = f"Basic {b64encode(f'{settings.user}:{settings.password}'.encode()).decode()}"
        path = f"/v2/keys{quote(key, safe='/')}?{query}"
        try:
            return await self._http.ask(
                method, path, understand or _understand, body={"data": form} if form else {}, headers=headers
            )
        except _Refusal as refusal:
            if method != "GET" and refusal.code in ANOTHER_WAS_FASTER:
                return None
            if refusal.code == UNAUTHORIZED:
                remedy = (
                    f"user {settings.user} may not use {key}, or has another password"
                    if settings.user
                    else "add the rendezvous setting user"
                )
                raise InputError(f"{self.name} refused the credentials: {remedy}") from None
            raise RendezvousStateError(f"{self.name} refuses: {refusal.message}") from None


def _understand(answer: Answer) -> _Node:
    """The node in an answer.

    Raises:
        _Refusal: etcd says no.
        Elsewhere: it says "not now".
        NotUnderstood: this is not etcd's v2 API.
    """
    try:
        message = json.loads(answer.body)
        index = int(answer.headers.get("X-Etcd-Index", "0"))
        if answer.status in {200, 201}:
            return _node(message["node"], index)
        code, text = message["errorCode"], f"{message['message']} ({message.get('cause', '')})"
    except (ValueError, LookupError, TypeError, RecursionError):
        code, text, index = 0, "", 0
    if answer.status in {500, 502, 503, 504}:
        raise Elsewhere(text or f"it answers with status {answer.status}")
    if not isinstance(code, int) or not code:
        raise NotUnderstood
    raise _Refusal(code, index, text)


def _understand_read(answer: Answer) -> _Node:
    """The same, where no node is an answer, too."""
    try:
        return _understand(answer)
    except _Refusal as refusal:
        if refusal.code != KEY_NOT_FOUND:
            raise
        return _Node(index=refusal.index)


def _node(data: Any, index: int) -> _Node:
    numbers = made, modified = data["createdIndex"], data["modifiedIndex"]
    value = data.get("value", "")
    if not all(isinstance(number, int) and number > 0 for number in numbers) or not isinstance(value, str):
        raise TypeError
    # etcd's own index of a write is that of the node.
    return _Node(
        index=max(index, modified),
        value=value,
        made=made,
        modified=modified,
        is_mortal="expiration" in data,  # the `ttl` is left out when it has come down to 0
    )
