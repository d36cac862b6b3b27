"""The store `etcd-v3`: etcd's v3 API, through the JSON gateway that every etcd since 3.4 serves.

About the gateway (all seen on 3.4 and 3.5): integers come as text, zero and empty values are omitted, keys and values
are base64, and errors have a gRPC `code`.

Never send a transaction that only reads: before 3.4.20 and 3.5.5, a client that sends one and is killed meanwhile ends
the etcd server (etcd-io/etcd#14110).
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from aelastic.errors import InputError, RendezvousStateError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.etcd_http import (
    Elsewhere,
    EtcdStore,
    HttpAnswer,
    HttpRequest,
    KeyValue,
    NotUnderstood,
    Refusal,
)

# grpc/status: what went wrong.
INVALID_ARGUMENT, PERMISSION_DENIED, FAILED_PRECONDITION, UNAUTHENTICATED = 3, 7, 9, 16
# Unknown, deadline exceeded, resource exhausted, aborted, internal, unavailable: this member, now.
PASSING = {2, 4, 8, 10, 13, 14}
JsonObject = dict[str, Any]


class EtcdV3(EtcdStore):
    """The cell of one run id, through v3."""

    backend = "etcd-v3"
    without_api = "does not serve its v3 API over HTTP: start it without --enable-grpc-gateway=false, or use etcd-v2"

    def __init__(self, settings: RendezvousSettings, run_id: str) -> None:
        super().__init__(settings, run_id)
        self._token: str | None = None  # of our user; empty if etcd requires none
        self._range = {"key": _base64(self._key.encode())}

    async def _look(self) -> KeyValue:
        return self._entry(await self._call("kv/range", self._range))

    async def _replace(self, seen: KeyValue, new: bytes) -> KeyValue:
        written = {"request_put": {**self._range, "value": _base64(new)}}
        compare = {**self._range, "target": "MOD", "result": "EQUAL", "mod_revision": str(seen.modified)}
        message = {"compare": [compare], "success": [written], "failure": [{"request_range": self._range}]}
        answer = await self._call("kv/txn", message)
        if answer.get("succeeded") is True:
            return KeyValue(new, self._number(_part(answer, "header"), "revision"))
        responses = answer.get("responses")
        if not (isinstance(responses, list) and len(responses) == 1 and isinstance(responses[0], dict)):
            raise self._unexpected("kv/txn")
        return self._entry(_part(responses[0], "response_range"))

    def _entry(self, answer: JsonObject) -> KeyValue:
        """Returns the key in the answer to a range request."""
        kvs = answer.get("kvs") or [{}]
        # The store's revision is never 0; an answer without it says nothing about the key.
        is_answer = self._number(_part(answer, "header"), "revision") and isinstance(kvs, list)
        if not (is_answer and isinstance(kvs[0], dict)):
            raise self._unexpected("kv/range")
        try:
            return KeyValue(b64decode(kvs[0].get("value", "")), self._number(kvs[0], "mod_revision"))
        except (TypeError, ValueError):
            raise self._unexpected("kv/range") from None

    def _unexpected(self, path: str) -> RendezvousStateError:
        return RendezvousStateError(
            f"{self.name} gave an unexpected answer to {path}; is this etcd?", topic="something-other-than-etcd-answers"
        )

    def _number(self, message: Mapping[str, Any], name: str) -> int:
        """Returns a 64-bit integer, which comes as text, and is omitted if it is zero."""
        try:
            return int(message.get(name, 0))
        except (TypeError, ValueError):
            raise RendezvousStateError(
                f"{self.name} returned a {name} that is not a number", topic="something-other-than-etcd-answers"
            ) from None

    async def _call(self, path: str, message: JsonObject) -> JsonObject:
        """Calls a method of etcd, with a new token for our user if the old one has expired.

        Args:
            path: the path below `/v3/`.
            message: in etcd's format.
        """
        for attempt in (1, 2):
            if self._token is None:
                self._token = await self._authenticate()
            headers = {"Authorization": self._token} if self._token else {}
            try:
                return await self._ask(_request_of(path, message, headers), _understand)
            except Refusal as refusal:
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
            answer = await self._ask(_request_of("auth/authenticate", message, {}), _understand)
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
        return InputError(
            f"{self.name} refused the credentials ({refusal.message}): {self._remedy}",
            topic="etcd-refuses-the-credentials",
        )


def _is_about_token(refusal: Refusal) -> bool:
    """Returns whether the token is missing, expired (after 5 minutes, or when etcd restarts), or cannot be obtained."""
    words = refusal.message
    is_argument = refusal.code == INVALID_ARGUMENT and ("user" in words or "auth store is old" in words)
    return refusal.code == UNAUTHENTICATED or is_argument


def _request_of(path: str, message: JsonObject, headers: Mapping[str, str]) -> HttpRequest:
    return HttpRequest("POST", f"/v3/{path}", json.dumps(message).encode(), "application/json", headers)


def _understand(answer: HttpAnswer) -> JsonObject:
    """Returns the message in an answer.

    Raises:
        Refusal: etcd refuses.
        Elsewhere: this member cannot answer now.
        NotUnderstood: this is not etcd's gateway.
    """
    try:
        message = json.loads(answer.body)
    except (ValueError, RecursionError):
        message = None
    if isinstance(message, dict):
        if answer.status == 200 and "header" in message:
            return message
        code, text = message.get("code"), message.get("message")
        if isinstance(code, int) and isinstance(text, str):
            if code in PASSING:
                raise Elsewhere(text)
            raise Refusal(code, text)
    if answer.status in {500, 502, 503, 504}:
        raise Elsewhere(f"it answers with status {answer.status}")
    raise NotUnderstood


def _base64(text: bytes) -> str:
    return b64encode(text).decode()


def _part(message: JsonObject, name: str) -> JsonObject:
    part = message.get(name)
    return part if isinstance(part, dict) else {}
