"""One job's keys on etcd v3, for agents of torchrun.

    <prefix>/<run id>/torchrun/state          torch's rendezvous, written by compare and swap
    <prefix>/<run id>/torchrun/store/<key>    the agents' store: ranks, barriers, where the workers' store is
    <prefix>/<run id>/torchrun/added/<any>    what an addition came to, should its answer be lost

All of them hang on one lease: the agent that makes the state makes it, agents that have written the state keep it
alive.  When no such agent is left they vanish, in one step: a rendezvous never meets keys of an earlier one.  An
agent that only reads keeps nothing alive, so agents that are started over and over cannot keep a closed rendezvous
closed.

Every write may be asked twice, since an answer may be lost: it is done once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import anyio

from aelastic.aio import clock
from aelastic.core.record import Record
from aelastic.errors import AelasticError, RendezvousConnectionError, RendezvousStateError
from aelastic.rdzv.boards.etcd_v3_calls import (
    FAILED_PRECONDITION,
    NOT_FOUND,
    EtcdV3Calls,
    JsonObject,
    part_of,
    to_base64,
)
from aelastic.rdzv.settings import RendezvousSettings

_log = logging.getLogger(__name__)

T = TypeVar("T")

# A server that is restarted is back within this time; no workers stand still for longer than they must.
PATIENCE_S = 30.0
ASK_AGAIN_S = 0.5
# A watch whose connection has died unnoticed costs no more than this.
LOOK_AGAIN_S = 10.0
# Of more keys than a few, all that lie between are read, page by page: agents ask for what they have numbered.
_FEW_KEYS = 4
_KEYS_AT_ONCE = 100


class Entry(Record):
    """A key as etcd has it."""

    value: bytes
    modified: int  # the revision of its last write; 0: there is none
    lease: int


class JobKeys:
    """The keys of one job, as one agent uses them.  In one event loop; its calls may overlap.

    Args:
        settings: `endpoint`, `lease_s` (as a limit for each call), and of `config` what `etcd_settings.py` says.
        run_id: any text.
        ttl_s: how long the keys outlive the last agent.

    Raises:
        InputError: a setting that cannot work.
    """

    def __init__(self, settings: RendezvousSettings, run_id: str, ttl_s: int) -> None:
        self._etcd = EtcdV3Calls(settings)
        self._folder = self._etcd.http.settings.folder(run_id) + "/torchrun"
        self._state_key = f"{self._folder}/state"
        self._ttl_s = ttl_s
        self._lease = 0  # that of the state, when we last saw it
        self._kept = 0  # the one we keep alive
        self._turn = asyncio.Lock()

    async def aclose(self) -> None:
        await self._etcd.http.aclose()

    async def keep_alive(self) -> None:
        """Keeps the lease alive, for as long as it runs.  Where etcd cannot be reached it goes on trying."""
        while True:
            interval_s = self._ttl_s / 3
            if (lease := self._kept) != 0:
                try:
                    answer = await self._call("lease/keepalive", {"ID": str(lease)}, or_no=NOT_FOUND)
                except AelasticError as error:
                    _log.info("the rendezvous' keys could not be kept alive: %s", error)
                    interval_s = min(interval_s, ASK_AGAIN_S)
                else:
                    self._note_kept(lease, answer)
            await anyio.sleep(interval_s)

    def _note_kept(self, lease: int, answer: JsonObject | None) -> None:
        if self._kept != lease or self._etcd.number(part_of(answer or {}, "result"), "TTL") > 0:
            return
        self._kept = 0
        _log.warning("%s: the job's keys expired: no agent refreshed them for %d s", self._etcd.name, self._ttl_s)

    # The state of the rendezvous.

    async def state(self) -> tuple[bytes, int] | None:
        """The state and its token."""
        (entry,), _ = await self._look([self._state_key])
        self._adopt(entry)
        return (entry.value, entry.modified) if entry.modified else None

    async def write_state(self, state: bytes, token: object) -> tuple[bytes, int, bool] | None:
        """Writes the state if its token is still this one; with `None`, if there is no state.

        Returns:
            The state that is there now, its token, and whether it is the one that was to be written.
        """
        if token is None:
            return await self._create_state(state)
        if not isinstance(token, int) or token <= 0:
            now = await self.state()
            return now and (*now, False)
        put = {"key": to_base64(self._state_key), "value": _bytes_to_base64(state), "ignore_lease": True}
        written, (found,) = await self._write([(self._state_key, token)], [{"request_put": put}], [self._state_key])
        if written:
            self._kept = self._lease
            return state, written, True
        return self._found(found, state)

    async def _create_state(self, state: bytes) -> tuple[bytes, int, bool] | None:
        lease = secrets.randbelow(2**63 - 1) + 1  # ours to choose, so that asking twice makes one
        # "Lease already exists" says that we were granted it, and the answer was lost.
        await self._call("lease/grant", {"ID": str(lease), "TTL": str(self._ttl_s)}, or_no=FAILED_PRECONDITION)
        written, (found,) = await self._write(
            [(self._state_key, 0)], [_put(self._state_key, state, lease)], [self._state_key]
        )
        if written or found.lease == lease:
            self._lease = self._kept = lease
            return state, written or found.modified, True
        await self._call("lease/revoke", {"ID": str(lease)}, or_no=NOT_FOUND)
        return self._found(found, state)

    def _found(self, found: Entry, state: bytes) -> tuple[bytes, int, bool] | None:
        self._adopt(found)
        # Each state has times of its own in it: the same one is ours, and the answer was lost.
        return (found.value, found.modified, found.value == state) if found.modified else None

    def _adopt(self, entry: Entry) -> None:
        if entry.modified and not entry.lease:
            raise RendezvousStateError(
                f"{self._etcd.name}: key {self._state_key} was not written by an aelastic agent (it has no lease): "
                "delete it, or use another run id"
            )
        self._lease = entry.lease

    # The agents' store.

    async def put(self, key: str, value: bytes) -> None:
        await self._write([], [_put(self._store_key(key), value, await self._lease_now())], [])

    async def get(self, keys: Sequence[str]) -> list[bytes]:
        """The values, as soon as there are all of them."""
        return [entry.value for entry in await self._all_of(keys)]

    async def has(self, keys: Sequence[str]) -> bool:
        entries, _ = await self._look([self._store_key(key) for key in keys], keys_only=True)
        return all(entry.modified for entry in entries)

    async def wait(self, keys: Sequence[str]) -> None:
        """Waits until there are all of them."""
        await self._all_of(keys, keys_only=True)

    async def add(self, key: str, amount: int) -> int:
        """Adds to a number, 0 at first; gives the sum."""
        name, added = self._store_key(key), f"{self._folder}/added/{secrets.token_hex(16)}"
        lease, seen = await self._lease_now(), _NOTHING
        while True:
            total = self._number_in(name, seen) + amount
            text = str(total).encode()
            written, (seen, mine) = await self._write(
                [(name, seen.modified), (added, 0)], [_put(name, text, lease), _put(added, text, lease)], [name, added]
            )
            if written:
                return total
            if mine.modified:  # it was added before, and the answer was lost
                return self._number_in(added, mine)

    async def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Writes a value in place of an expected one, or, where that is empty, of none; gives what is there then."""
        name, lease = self._store_key(key), await self._lease_now()
        (seen,), _ = await self._look([name])
        while True:
            if seen.value != expected:
                return seen.value if seen.modified else expected
            written, (seen,) = await self._write([(name, seen.modified)], [_put(name, desired, lease)], [name])
            if written or seen.value == desired:
                return desired

    async def delete(self, key: str) -> bool:
        """Deletes a key; says whether there was one."""
        answer = await self._call("kv/deleterange", {"key": to_base64(self._store_key(key))}) or {}
        return self._etcd.number(answer, "deleted") > 0

    async def count(self) -> int:
        first, last = self._store_key(""), self._store_key("").removesuffix("/") + "0"  # the character after the slash
        message = {"key": to_base64(first), "range_end": to_base64(last), "count_only": True}
        return self._etcd.number(await self._call("kv/range", message) or {}, "count")

    def _store_key(self, key: str) -> str:
        return f"{self._folder}/store/{key}"

    async def _lease_now(self) -> int:
        if not self._lease:
            await self.state()
        if not self._lease:
            raise RendezvousStateError(
                f"{self._etcd.name}: no agent has joined {self._folder}: join the rendezvous before using the store"
            )
        return self._lease

    async def _all_of(self, keys: Sequence[str], *, keys_only: bool = False) -> list[Entry]:
        names = [self._store_key(key) for key in keys]
        while True:
            entries, revision = await patiently(lambda: self._look(names, keys_only=keys_only), PATIENCE_S)
            missing = next((name for name, entry in zip(names, entries, strict=True) if not entry.modified), None)
            if missing is None:
                return entries
            with anyio.move_on_after(LOOK_AGAIN_S):
                if not await self._etcd.wait_change(missing, revision):
                    await anyio.sleep(ASK_AGAIN_S)

    def _number_in(self, name: str, entry: Entry) -> int:
        try:
            return int(entry.value or b"0")
        except ValueError:
            raise RendezvousStateError(
                f"{self._etcd.name}: key {name} holds no number: nothing can be added to it"
            ) from None

    # What etcd is asked.

    async def _look(self, names: Sequence[str], *, keys_only: bool = False) -> tuple[list[Entry], int]:
        """These keys, and a revision after which none of them has been missed."""
        found: dict[bytes, Entry] = {}
        revision = 0
        spans = [(name, name) for name in names] if len(names) <= _FEW_KEYS else [(min(names), max(names))]
        for first, last in spans:
            at = first.encode()
            while at <= last.encode():
                # A range, and not a transaction of ranges: see `etcd_v3_calls.py`.
                end = b"" if first == last else last.encode() + b"\0"
                asked = {"key": _bytes_to_base64(at), "range_end": _bytes_to_base64(end), "limit": str(_KEYS_AT_ONCE)}
                answer = await self._call("kv/range", {**asked, "keys_only": keys_only}) or {}
                revision = revision or self._etcd.number(part_of(answer, "header"), "revision")
                page = self._page(answer)
                found.update(page)
                if answer.get("more") is not True or not page:
                    break
                at = max(page) + b"\0"  # the next key there can be
        return [found.get(name.encode(), _NOTHING) for name in names], revision

    async def _write(
        self, unchanged: Sequence[tuple[str, int]], puts: Sequence[JsonObject], else_look: Sequence[str]
    ) -> tuple[int, list[Entry]]:
        """Writes if no key has changed since its revision.

        Returns:
            The revision; or 0 and what the others hold.
        """
        message = {
            "compare": [
                {"key": to_base64(name), "target": "MOD", "result": "EQUAL", "mod_revision": str(revision)}
                for name, revision in unchanged
            ],
            "success": puts,
            "failure": [_range(name) for name in else_look],
        }
        if (answer := await self._call("kv/txn", message, or_no=NOT_FOUND)) is None:
            self._lease = 0
            raise RendezvousConnectionError(
                f"{self._etcd.name}: the job's keys expired: no agent refreshed them for {self._ttl_s} s"
            )
        if answer.get("succeeded") is True:
            return self._etcd.number(part_of(answer, "header"), "revision"), [_NOTHING] * len(else_look)
        return 0, self._entries(answer, len(else_look))

    def _page(self, answer: JsonObject) -> dict[bytes, Entry]:
        """The keys in the answer to a range."""
        try:
            return {b64decode(kv["key"]): self._entry(kv) for kv in answer.get("kvs", [])}
        except (LookupError, TypeError, ValueError, AttributeError):
            raise RendezvousStateError(
                f"{self._etcd.name} gave an unexpected answer to kv/range; is this etcd?"
            ) from None

    def _entries(self, answer: JsonObject, count: int) -> list[Entry]:
        """What the ranges of a transaction gave, each of one key."""
        try:
            found = [response["response_range"].get("kvs", [{}])[0] for response in answer.get("responses", [])]
            entries = [self._entry(kv) for kv in found]
        except (LookupError, TypeError, ValueError, AttributeError):
            entries = []
        if len(entries) != count:
            raise RendezvousStateError(f"{self._etcd.name} gave an unexpected answer to kv/txn; is this etcd?")
        return entries

    def _entry(self, kv: JsonObject) -> Entry:
        return Entry(
            value=b64decode(kv.get("value", "")),
            modified=self._etcd.number(kv, "mod_revision"),
            lease=self._etcd.number(kv, "lease"),
        )

    async def _call(self, path: str, message: JsonObject, or_no: int | None = None) -> JsonObject | None:
        async with self._turn:
            with self._etcd.http.within_lease():
                return await self._etcd.call(path, message, or_no)


async def patiently(ask: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """What is asked for, asked again for so long while etcd cannot be reached."""
    deadline = clock.now() + patience_s
    while True:
        try:
            return await ask()
        except RendezvousConnectionError:
            if clock.now() >= deadline:
                raise
        await anyio.sleep(ASK_AGAIN_S)


_NOTHING = Entry(value=b"", modified=0, lease=0)


def _put(name: str, value: bytes, lease: int) -> JsonObject:
    return {"request_put": {"key": to_base64(name), "value": _bytes_to_base64(value), "lease": str(lease)}}


def _range(name: str) -> JsonObject:
    return {"request_range": {"key": to_base64(name)}}


def _bytes_to_base64(value: bytes) -> str:
    return b64encode(value).decode()
