"""etcd's v3 API, through the JSON gateway that every etcd since 3.4 serves: users, tokens, refusals.

Of the gateway (all seen on 3.4 and 3.5): integers come as text, what is zero or empty is left out, keys
and values are base64, a lost lease is kept alive with status 200 and no `TTL`, errors have a gRPC `code`.

Never ask for a transaction that only reads: a client that asks for one and is killed meanwhile ends the etcd server,
before 3.4.20 and 3.5.5 (etcd-io/etcd#14110).
"""

from __future__ import annotations

import json
import secrets
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from aelastic.errors import InputError, RendezvousStateError
from aelastic.rdzv.boards.etcd_http import Answer, Elsewhere, Entry, EtcdClient, NotUnderstood, Question, Refusal
from aelastic.rdzv.settings import RendezvousSettings

# grpc/status: what went wrong.
INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION, UNAUTHENTICATED = 3, 5, 7, 9, 16
# Unknown, deadline exceeded, resource exhausted, aborted, internal, unavailable: this member, now.
PASSING = {2, 4, 8, 10, 13, 14}
JsonObject = dict[str, Any]


class EtcdV3(EtcdClient):
    """A client that speaks v3."""

    backend = "etcd-v3"
    without_api = "does not serve its v3 API over HTTP: start it without --enable-grpc-gateway=false, or use etcd-v2"

    def __init__(self, settings: RendezvousSettings) -> None:
        super().__init__(settings)
        self._token: str | None = None  # of our user; empty where etcd asks for none

    async def get(self, key: str) -> Entry:
        answer = await self._call("kv/range", {"key": _base64(key)}) or {}
        kvs = answer.get("kvs") or [{}]
        revision = self._number(_part(answer, "header"), "revision")
        if not (revision and isinstance(kvs, list) and isinstance(kvs[0], dict)):
            raise RendezvousStateError(
                f"{self.name} gave an unexpected answer to kv/range; is this etcd?",
                topic="something-other-than-etcd-answers",
            )
        kv = kvs[0]
        try:
            value = b64decode(kv.get("value", ""))
        except (TypeError, ValueError):
            value = b""  # which is none that an agent writes
        made, modified, lease = (self._number(kv, name) for name in ("create_revision", "mod_revision", "lease"))
        return Entry(revision, value, made, modified, str(lease or ""))

    async def claim(self, key: str, seen: Entry, value: bytes, floor: tuple[str, Entry, bytes | None]) -> Entry | None:
        floor_key, floor_seen, raised = floor
        lease = str(secrets.randbelow(2**63 - 1) + 1)  # ours to choose, so that asking twice makes one
        # "Lease already exists" says that we were granted it, and the answer was lost.
        await self._call("lease/grant", {"ID": lease, "TTL": str(self._ttl_s)}, or_no=FAILED_PRECONDITION)
        puts = [_put(key, value, lease), *([] if raised is None else [_put(floor_key, raised)])]
        if not (written := await self._write({key: seen, floor_key: floor_seen}, puts)):
            return None
        return Entry(revision=written, value=value, made=seen.made or written, modified=written, lease=lease)

    async def amend(self, key: str, seen: Entry, value: bytes) -> bool:
        return bool(await self._write({key: seen}, [_put(key, value, seen.lease)]))

    async def keep(self, key: str, seen: Entry) -> bool:  # noqa: ARG002  the lease is its own
        answer = await self._call("lease/keepalive", {"ID": seen.lease}, or_no=NOT_FOUND) or {}
        return self._number(_part(answer, "result"), "TTL") > 0

    async def forget(self, key: str, seen: Entry) -> bool:  # noqa: ARG002  as above
        # The key goes with the lease; should it be another's by now, it is under another lease.
        await self._call("lease/revoke", {"ID": seen.lease}, or_no=NOT_FOUND)
        return True

    async def _write(self, seen: Mapping[str, Entry], puts: list[JsonObject]) -> int:
        """Writes if no other agent has since the read; gives the revision, 0 if one has."""
        compare = [
            {"key": _base64(key), "target": "MOD", "result": "EQUAL", "mod_revision": str(entry.modified)}
            for key, entry in seen.items()
        ]
        # Not found is a lease that has ended meanwhile.
        answer = await self._call("kv/txn", {"compare": compare, "success": puts}, or_no=NOT_FOUND) or {}
        return self._number(_part(answer, "header"), "revision") if answer.get("succeeded") is True else 0

    def _number(self, message: Mapping[str, Any], name: str) -> int:
        """A 64-bit integer: text, and left out if it is zero."""
        try:
            return int(message.get(name, 0))
        except (TypeError, ValueError):
            raise RendezvousStateError(
                f"{self.name} returned a {name} that is not a number", topic="something-other-than-etcd-answers"
            ) from None

    async def _call(self, path: str, message: JsonObject, or_no: int | None = None) -> JsonObject | None:
        """Calls a method of etcd's, with a new token for our user if the old one has expired.

        Args:
            path: below `/v3/`.
            message: in etcd's words.
            or_no: with this code etcd says no, and we get `None`; any other is an error.
        """
        for attempt in (1, 2):
            if self._token is None:
                self._token = await self._authenticate()
            headers = {"Authorization": self._token} if self._token else {}
            try:
                return await self._ask(Question("POST", f"/v3/{path}", {"json": message}, headers), _understand)
            except Refusal as refusal:
                if refusal.code == or_no:
                    return None
                if attempt == 2 or not self.settings.user or not _is_about_token(refusal):
                    raise self._error(refusal) from None
                self._token = None
        raise AssertionError("the second attempt returns or raises")

    async def _authenticate(self) -> str:
        settings = self.settings
        if not settings.user:
            return ""
        message = {"name": settings.user, "password": settings.password}
        try:
            answer = await self._ask(Question("POST", "/v3/auth/authenticate", {"json": message}), _understand)
        except Refusal as refusal:
            if refusal.code == FAILED_PRECONDITION:  # "authentication is not enabled"
                return ""
            raise self._error(refusal) from None
        token = answer.get("token")
        if not isinstance(token, str) or not token.isprintable():
            raise RendezvousStateError(
                f"{self.name} accepted the password but returned no token", topic="etcd-refuses-the-credentials"
            )
        return token

    def _error(self, refusal: Refusal) -> Exception:
        if refusal.code != PERMISSION_DENIED and not _is_about_token(refusal):
            return RendezvousStateError(f"{self.name} refuses: {refusal.message}")
        user = self.settings.user
        remedy = (
            f"user {user} may not access keys below {self.settings.prefix}, or the password is wrong"
            if user
            else "add the rendezvous setting user"
        )
        return InputError(
            f"{self.name} refused the credentials ({refusal.message}): {remedy}", topic="etcd-refuses-the-credentials"
        )


def _is_about_token(refusal: Refusal) -> bool:
    """Whether there is none, or an expired one (after 5 minutes, and when etcd restarts), or none to be had."""
    words = refusal.message
    is_argument = refusal.code == INVALID_ARGUMENT and ("user" in words or "auth store is old" in words)
    return refusal.code == UNAUTHENTICATED or is_argument


def _put(key: str, value: bytes, lease: str = "0") -> JsonObject:
    return {"request_put": {"key": _base64(key), "value": b64encode(value).decode(), "lease": lease}}


def _understand(answer: Answer) -> JsonObject:
    """The message in an answer.

    Raises:
        Refusal: etcd says no.
        Elsewhere: it says "not now".
        NotUnderstood: this is not etcd's gateway.
    """
    try:
        message = json.loads(answer.body)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict):
        if answer.status == 200 and ("header" in message or "result" in message):
            return message
        # Of a stream, which keeping a lease alive is, the error is one level down, under other names.
        error = message["error"] if isinstance(message.get("error"), dict) else message
        code = error.get("code", error.get("grpc_code"))
        if isinstance(code, int) and isinstance(text := error.get("message"), str):
            if code in PASSING:
                raise Elsewhere(text)
            raise Refusal(code, text)
    if answer.status in {500, 502, 503, 504}:
        raise Elsewhere(f"it answers with status {answer.status}")
    raise NotUnderstood


def _base64(text: str) -> str:
    return b64encode(text.encode()).decode()


def _part(message: JsonObject, name: str) -> JsonObject:
    part = message.get(name)
    return part if isinstance(part, dict) else {}
