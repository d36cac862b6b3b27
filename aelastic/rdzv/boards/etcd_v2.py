"""etcd's v2 API, which etcd up to 3.5 serves with `--enable-v2`.

Every write names the index that it replaces.  A renewal counts as a write, but changes neither the value nor the
index at which it was made.  Reads go through the cluster's quorum: a member may be behind.
"""

from __future__ import annotations

import json
from base64 import b64encode
from typing import Any
from urllib.parse import quote

from aelastic.errors import InputError, RendezvousStateError
from aelastic.rdzv.boards.etcd_http import Answer, Elsewhere, Entry, EtcdClient, NotUnderstood, Question, Refusal

# Documentation/v2/errorcode.md of etcd 3.4.
KEY_NOT_FOUND, COMPARE_FAILED, KEY_EXISTS, UNAUTHORIZED = 100, 101, 105, 110
ANOTHER_WAS_FASTER = {KEY_NOT_FOUND, COMPARE_FAILED, KEY_EXISTS}


class EtcdV2(EtcdClient):
    """A client that speaks v2."""

    backend = "etcd-v2"
    without_api = "does not serve the v2 API: use the back end etcd-v3, or start it with --enable-v2"

    async def get(self, key: str) -> Entry:
        entry = await self._request_key("GET", key, "quorum=true")
        assert entry is not None  # no write gets ahead of a read
        return entry

    async def claim(self, key: str, seen: Entry, value: bytes, floor: tuple[str, Entry, bytes | None]) -> Entry | None:
        floor_key, floor_seen, raised = floor
        if raised is not None and await self._put(floor_key, floor_seen, {"value": raised.decode()}) is None:
            return None
        return await self._put(key, seen, {"value": value.decode(), "ttl": str(self._ttl_s)})

    async def amend(self, key: str, seen: Entry, value: bytes) -> bool:
        return await self._put(key, seen, {"value": value.decode(), "ttl": str(self._ttl_s)}) is not None

    async def keep(self, key: str, seen: Entry) -> bool:
        return await self._put(key, seen, {"ttl": str(self._ttl_s), "refresh": "true"}) is not None

    async def forget(self, key: str, seen: Entry) -> bool:
        return await self._request_key("DELETE", key, _as_seen(seen)) is not None

    async def _put(self, key: str, seen: Entry, form: dict[str, str]) -> Entry | None:
        return await self._request_key("PUT", key, _as_seen(seen), form)

    async def _request_key(self, method: str, key: str, query: str, form: dict[str, str] | None = None) -> Entry | None:
        """What etcd answers with; `None` if another agent wrote since the read."""
        settings = self.settings
        headers = {}
        if settings.user:
            headers["Authorization"] = f"Basic {b64encode(f'{settings.user}:{settings.password}'.encode()).decode()}"
        path, body = f"/v2/keys{quote(key, safe='/')}?{query}", {"data": form} if form else {}
        try:
            return await self._ask(Question(method, path, body, headers), _understand)
        except Refusal as refusal:
            if method == "GET" and refusal.code == KEY_NOT_FOUND:
                return Entry(revision=refusal.index)
            if method != "GET" and refusal.code in ANOTHER_WAS_FASTER:
                return None
            if refusal.code == UNAUTHORIZED:
                remedy = (
                    f"user {settings.user} may not access {key}, or the password is wrong"
                    if settings.user
                    else "add the rendezvous setting user"
                )
                raise InputError(
                    f"{self.name} refused the credentials: {remedy}", topic="etcd-refuses-the-credentials"
                ) from None
            raise RendezvousStateError(f"{self.name} refuses: {refusal.message}") from None


def _as_seen(seen: Entry) -> str:
    """The condition of a write that replaces just this."""
    return f"prevIndex={seen.modified}" if seen.modified else "prevExist=false"


def _understand(answer: Answer) -> Entry:
    """The node in an answer.

    Raises:
        Refusal: etcd says no.
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
    raise Refusal(code, text, index)


def _node(data: Any, index: int) -> Entry:
    numbers = made, modified = data["createdIndex"], data["modifiedIndex"]
    value = data.get("value", "")
    if not all(isinstance(number, int) and number > 0 for number in numbers) or not isinstance(value, str):
        raise TypeError
    lease = "ttl" if "expiration" in data else ""  # the `ttl` is left out when it has come down to 0
    # etcd's own index of a write is that of the node.
    return Entry(max(index, modified), value.encode(errors="surrogatepass"), made, modified, lease)
