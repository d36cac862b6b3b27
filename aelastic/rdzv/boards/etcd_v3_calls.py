"""Calling etcd's v3 API through the JSON gateway that every etcd since 3.4 serves: users, tokens, refusals.

Of the gateway (all seen on 3.4 and 3.5): integers come as text, what is zero or empty is left out, keys
and values are base64, a lost lease is kept alive with status 200 and no `TTL`, errors have a gRPC `code`.

Never ask for a transaction that only reads: a client that asks for one and is killed meanwhile ends the etcd server,
before 3.4.20 and 3.5.5 (etcd-io/etcd#14110).
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from aelastic.errors import InputError, RendezvousStateError
from aelastic.rdzv.boards.etcd_http import Answer, Elsewhere, EtcdHttp, NotUnderstood
from aelastic.rdzv.settings import RendezvousSettings

# grpc/status: what went wrong.
INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, FAILED_PRECONDITION, UNAUTHENTICATED = 3, 5, 7, 9, 16
# Unknown, deadline exceeded, resource exhausted, aborted, internal, unavailable: this member, now.
PASSING = {2, 4, 8, 10, 13, 14}
JsonObject = dict[str, Any]


class _Refusal(Exception):
    """etcd understood, and says no."""

    def __init__(self, code: int, message: str) -> None:
        self.code, self.message = code, message
        super().__init__(code, message)

    @property
    def is_about_token(self) -> bool:
        """Whether there is none, or an expired one (after 5 minutes, and when etcd restarts), or none to be had."""
        is_argument = self.code == INVALID_ARGUMENT and ("user" in self.message or "auth store is old" in self.message)
        return self.code == UNAUTHENTICATED or is_argument


class EtcdV3Calls:
    """One client of an etcd cluster that speaks v3.  One call at a time.

    Args:
        settings: `endpoint`, `lease_s`, and of `config` what `etcd_settings.py` says.

    Raises:
        InputError: a setting that cannot work.
    """

    def __init__(self, settings: RendezvousSettings) -> None:
        self.http = EtcdHttp(
            settings,
            "etcd-v3",
            "does not serve its v3 API over HTTP: start it without --enable-grpc-gateway=false, or use etcd-v2",
        )
        self._token: str | None = None  # of our user; empty where etcd asks for none

    @property
    def name(self) -> str:
        return self.http.name

    def number(self, message: Mapping[str, Any], name: str) -> int:
        """A 64-bit integer: text, and left out if it is zero."""
        try:
            return int(message.get(name, 0))
        except (TypeError, ValueError):
            raise RendezvousStateError(f"{self.name} returned a {name} that is not a number") from None

    async def call(self, path: str, message: JsonObject, or_no: int | None = None) -> JsonObject | None:
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
                return await self.http.ask("POST", f"/v3/{path}", _understand, body={"json": message}, headers=headers)
            except _Refusal as refusal:
                if refusal.code == or_no:
                    return None
                if attempt == 2 or not self.http.settings.user or not refusal.is_about_token:
                    raise self._error(refusal) from None
                self._token = None
        raise AssertionError("the second attempt returns or raises")

    async def _authenticate(self) -> str:
        settings = self.http.settings
        if not settings.user:
            return ""
        message = {"name": settings.user, "password": settings.password}
        try:
            answer = await self.http.ask("POST", "/v3/auth/authenticate", _understand, body={"json": message})
        except _Refusal as refusal:
            if refusal.code == FAILED_PRECONDITION:  # "authentication is not enabled"
                return ""
            raise self._error(refusal) from None
        token = answer.get("token")
        if not isinstance(token, str) or not token.isprintable():
            raise RendezvousStateError(f"{self.name} accepted the password but returned no token")
        return token

    def _error(self, refusal: _Refusal) -> Exception:
        if refusal.code != PERMISSION_DENIED and not refusal.is_about_token:
            return RendezvousStateError(f"{self.name} refuses: {refusal.message}")
        user = self.http.settings.user
        remedy = (
            f"user {user} may not use what is below {self.http.settings.prefix}, or has another password"
            if user
            else "add the rendezvous setting user"
        )
        return InputError(f"{self.name} refused the credentials ({refusal.message}): {remedy}")


def _understand(answer: Answer) -> JsonObject:
    """The message in an answer.

    Raises:
        _Refusal: etcd says no.
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
            raise _Refusal(code, text)
    if answer.status in {500, 502, 503, 504}:
        raise Elsewhere(f"it answers with status {answer.status}")
    raise NotUnderstood


def to_base64(text: str) -> str:
    return b64encode(text.encode()).decode()


def part_of(message: JsonObject, name: str) -> JsonObject:
    part = message.get(name)
    return part if isinstance(part, dict) else {}
