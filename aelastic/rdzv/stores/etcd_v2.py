"""The store `etcd-v2`: etcd's v2 API, which etcd up to 3.5 serves with `--enable-v2`.

Every write names the index that it replaces.  Reads go through the cluster's quorum, because a member may be behind.
"""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any
from urllib.parse import quote, urlencode

from aelastic.errors import InputError, RendezvousStateError
from aelastic.rdzv.stores.etcd_http import (
    Elsewhere,
    EtcdStore,
    HttpAnswer,
    HttpRequest,
    KeyValue,
    NotUnderstood,
    Refusal,
)

# Documentation/v2/errorcode.md of etcd 3.4.
KEY_NOT_FOUND, COMPARE_FAILED, NOT_A_FILE, KEY_EXISTS, UNAUTHORIZED = 100, 101, 102, 105, 110
ANOTHER_WAS_FASTER = {KEY_NOT_FOUND, COMPARE_FAILED, KEY_EXISTS}


class EtcdV2(EtcdStore):
    """The cell of one run id, through v2."""

    backend = "etcd-v2"
    without_api = "does not serve the v2 API: use the back end etcd-v3, or start it with --enable-v2"

    async def _look(self) -> KeyValue:
        try:
            return await self._request_key("GET", "quorum=true")
        except Refusal as refusal:
            if refusal.code == KEY_NOT_FOUND:
                return KeyValue()
            raise self._error(refusal) from None

    async def _replace(self, seen: KeyValue, new: bytes) -> KeyValue:
        condition = f"prevIndex={seen.modified}" if seen.modified else "prevExist=false"
        try:
            return await self._request_key("PUT", condition, {"value": new.decode()})
        except Refusal as refusal:
            if refusal.code not in ANOTHER_WAS_FASTER:
                raise self._error(refusal) from None
        return await self._look()

    async def _request_key(self, method: str, query: str, form: dict[str, str] | None = None) -> KeyValue:
        settings = self.settings
        headers: dict[str, str] = {}
        if settings.user:
            headers["Authorization"] = f"Basic {b64encode(f'{settings.user}:{settings.password}'.encode()).decode()}"
        path, body = f"/v2/keys{quote(self._key, safe='/')}?{query}", urlencode(form or {}).encode()
        request = HttpRequest(method, path, body, "application/x-www-form-urlencoded", headers)
        return await self._ask(request, _understand)

    def _error(self, refusal: Refusal) -> Exception:
        if refusal.code != UNAUTHORIZED:
            return RendezvousStateError(f"{self.name} refuses: {refusal.message}")
        return InputError(f"{self.name} refused the credentials: {self._remedy}", topic="etcd-refuses-the-credentials")


def _understand(answer: HttpAnswer) -> KeyValue:
    """Returns the node in an answer.

    Raises:
        Refusal: etcd refuses.
        Elsewhere: this member cannot answer now.
        NotUnderstood: this is not etcd's v2 API.
    """
    try:
        message = json.loads(answer.body)
        if answer.status in {200, 201}:
            return _entry(message["node"])
        code, text = message["errorCode"], f"{message['message']} ({message.get('cause', '')})"
    except (ValueError, LookupError, TypeError, RecursionError):
        code, text = 0, ""
    if answer.status in {500, 502, 503, 504}:
        raise Elsewhere(text or f"it answers with status {answer.status}")
    if not isinstance(code, int) or not code:
        raise NotUnderstood
    raise Refusal(code, text)


def _entry(node: Any) -> KeyValue:
    modified, value = node["modifiedIndex"], node.get("value", "")
    if node.get("dir"):
        raise Refusal(NOT_A_FILE, f"{node['key']} is a directory")
    if not isinstance(modified, int) or modified <= 0 or not isinstance(value, str):
        raise TypeError
    return KeyValue(value.encode(errors="surrogatepass"), modified)
