"""The cell in an etcd cluster, over HTTP: several endpoints, TLS, and a limit for everything, whatever the API.

    <prefix>/<run id>/coordinator   the text

If an endpoint does not answer in time, or reports that it cannot now, the next one is asked.  So a request may be sent
twice although only its first answer was lost: in that case a write that took effect finds its own text.  Proxies named
in the environment are not used: they would see the leader's address and token.
"""

from __future__ import annotations

import json
import os
import re
import socket
import ssl
from abc import abstractmethod
from collections.abc import Callable, Mapping
from io import BytesIO
from ipaddress import ip_address
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import anyio

from aelastic.base.host import names
from aelastic.base.record import Record
from aelastic.errors import InputError, RendezvousConnectionError, RendezvousStateError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.etcd_settings import Endpoint, etcd_settings
from aelastic.rdzv.stores.store import Store

if TYPE_CHECKING:
    import asyncio

    import aiohttp

T = TypeVar("T")

# etcd answers in milliseconds, or in tens of them while its disk is slow.  All endpoints must be asked within a lease.
ANSWER_LIMIT_S = 2.0
# The largest value that etcd accepts by default (1.5 MiB), as base64; a larger answer is refused.
MAX_ANSWER_BYTES = 4 * 1024 * 1024
_SHOWN_OF_ANSWER = 100


class NoSuchApiError(RendezvousStateError):
    """An etcd answers, but not with the API in use."""

    topic = "something-other-than-etcd-answers"


class Elsewhere(Exception):
    """This member cannot answer now, but another one may.  Raised by the caller's `understand`."""


class NotUnderstood(Exception):
    """The API has no such answer.  Raised by the caller's `understand`."""


class Refusal(Exception):
    """etcd understood, and refuses.  Raised by the caller's `understand`.

    Args:
        code: the code of the API.
        message: etcd's message.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(code, message)
        self.code, self.message = code, message


class HttpRequest(Record):
    """An HTTP request."""

    method: str
    path: str  # as sent, with the query if there is one
    body: bytes = b""
    body_type: str = ""
    headers: Mapping[str, str] = MappingProxyType({})  # further ones


class HttpAnswer(Record):
    """The answer of an endpoint."""

    endpoint: Endpoint
    request: HttpRequest
    status: int
    headers: Mapping[str, str]
    body: bytes

    def __str__(self) -> str:
        text = " ".join(self.body[: 4 * _SHOWN_OF_ANSWER].decode(errors="replace").split())[:_SHOWN_OF_ANSWER]
        server = f", Server: {self.headers['Server'][:_SHOWN_OF_ANSWER]}" if "Server" in self.headers else ""
        asked = f"{self.request.method} {self.request.path}"
        return f"{self.endpoint} answers {asked} with {self.status} ({text}{server})"


class KeyValue(Record):
    """The value that etcd keeps under a key."""

    value: bytes = b""
    modified: int = 0  # the revision (v2: index) of its last write; 0: there is no such key


class EtcdStore(Store):
    """The cell of one run id in an etcd cluster.  One request at a time.

    Args:
        settings: `endpoint`, `lease_s`, and those of `config` that `etcd_settings.py` lists.
        run_id: any text.

    Raises:
        InputError: a setting cannot work.
    """

    backend: ClassVar[str]  # the user's name for it
    without_api: ClassVar[str]  # what to do if an etcd does not know these paths

    def __init__(self, settings: RendezvousSettings, run_id: str) -> None:
        self.settings = etcd_settings(settings)
        self.at = ",".join(map(str, self.settings.endpoints))
        self._key = self.settings.key(run_id)
        self._seen: KeyValue | None = None  # under the key, as far as this agent knows
        # Each endpoint gets its turn within a lease.
        self._limit_s = min(ANSWER_LIMIT_S, settings.lease_s / len(self.settings.endpoints))
        self._first = 0  # the endpoint that answered last
        self._asked = self.settings.endpoints[0]
        self._ends: dict[Endpoint, tuple[str, str]] = {}  # of the last connection to it: ours, its
        self._session: aiohttp.ClientSession | None = None

    async def get(self) -> bytes:
        self._seen = await self._look()
        return self._seen.value

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        seen = self._seen
        if seen is None or seen.value != expected:
            seen = await self._look()
        self._seen = await self._replace(seen, new) if seen.value == expected else seen
        return self._seen.value

    @abstractmethod
    async def _look(self) -> KeyValue:
        """Returns the entry of the key."""

    @abstractmethod
    async def _replace(self, seen: KeyValue, new: bytes) -> KeyValue:
        """Writes a value unless another write came after the one that was seen; returns the entry afterwards."""

    @property
    def _remedy(self) -> str:
        """What to do if etcd refuses the credentials."""
        user = self.settings.user
        if not user:
            return "add the rendezvous setting user"
        return f"user {user} may not read and write {self._key}, or the password is wrong"

    @property
    def name(self) -> str:
        return f"{self.backend} at {self.at}"

    @property
    def where(self) -> str:
        return f"{self.name}: key {self._key}"

    @property
    def own_address(self) -> str:
        return self._ends.get(self.settings.endpoints[self._first], ("", ""))[0]

    @property
    def endpoint_host(self) -> str:
        endpoint = self.settings.endpoints[self._first]
        ours, theirs = self._ends.get(endpoint, ("", ""))
        # A connection to one of this machine's own addresses comes from that address, but one to any of 127/8 from
        # 127.0.0.1.
        is_here = bool(ours) and (ours == theirs or ip_address(ours).is_loopback)
        return endpoint.host if is_here else ""

    async def aclose(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            with anyio.CancelScope(shield=True):
                await session.close()

    async def _ask(self, request: HttpRequest, understand: Callable[[HttpAnswer], T]) -> T:
        """Asks one endpoint after the other until one answers; returns what `understand` makes of the answer.

        Args:
            request: the same for each.
            understand: may raise `Elsewhere`, so that the next endpoint is asked; anything else is for the caller.

        Raises:
            RendezvousConnectionError: none of them answers; with a reason for each.
            NoSuchApiError: an etcd answers, but does not know the path.
            RendezvousStateError: a server answers, but it is not etcd.
            InputError: only one side wants TLS, or one does not trust the other.
        """
        _import_aiohttp()
        endpoints = self.settings.endpoints
        start, reasons = self._first, []
        for turn in range(len(endpoints)):
            index = (start + turn) % len(endpoints)
            self._asked = endpoints[index]
            try:
                with anyio.fail_after(self._limit_s):
                    answer = await self._exchange(request)
                self._first = index
                return understand(answer)
            except TimeoutError:
                reasons.append(f"{self._asked}: no answer within {self._limit_s:g} s")
            except Elsewhere as error:
                reasons.append(f"{self._asked}: {error}")
            except NotUnderstood:
                raise await self._who_is(answer) from None
        raise RendezvousConnectionError(
            f"no answer from etcd ({'; '.join(reasons)}): check its servers and the network",
            topic="etcd-does-not-answer",
        )

    async def _exchange(self, request: HttpRequest) -> HttpAnswer:
        import aiohttp

        try:
            try:
                return await self._request(request)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    raise
                # A connection from before, to a server that has restarted since: ask again on a new one.
                return await self._request(request)
        except (aiohttp.ClientError, OSError) as error:
            raise self._cause(error) from None

    async def _request(self, request: HttpRequest) -> HttpAnswer:
        from yarl import URL

        endpoint, method, path = self._asked, request.method, request.path
        url, headers = URL(f"{endpoint.scheme}://{endpoint}{path}", encoded=True), dict(request.headers)
        body, session = None, self._open_session()
        if request.body:
            headers["Content-Type"], body = request.body_type, BytesIO(request.body)  # aiohttp warns of large bytes
        async with session.request(method, url, headers=headers, allow_redirects=False, data=body) as response:
            received = bytearray()
            async for chunk in response.content.iter_any():
                received += chunk
                if len(received) > MAX_ANSWER_BYTES:
                    raise RendezvousStateError(
                        f"{endpoint} answers {method} {path} with more than {MAX_ANSWER_BYTES} bytes",
                        topic="something-other-than-etcd-answers",
                    )
            return HttpAnswer(endpoint, request, response.status, response.headers, bytes(received))

    def _open_session(self) -> aiohttp.ClientSession:
        import aiohttp

        if self._session is not None:
            return self._session
        note, look_up_s = self._note_ends, self._limit_s

        class Resolver(aiohttp.abc.AbstractResolver):
            """Looks names up outside the loop's threads: a session that closes would wait for those."""

            async def resolve(
                self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
            ) -> list[Any]:
                found = [each for each in await names.look_up(host, look_up_s) if family in {0, each.family}]
                rest = {"hostname": host, "port": port, "proto": 0, "flags": socket.AI_NUMERICHOST}
                return [{"host": each.host, "family": each.family, **rest} for each in found]

            async def close(self) -> None: ...

        class Connector(aiohttp.TCPConnector):
            """Notes both ends of a new connection, which is back in the pool by the time a short answer is here."""

            async def _create_connection(self, *args: Any, **keywords: Any) -> Any:
                protocol = await super()._create_connection(*args, **keywords)
                note(protocol.transport)
                return protocol

        self._session = aiohttp.ClientSession(
            # `names` remembers addresses.
            connector=Connector(
                ssl=self.settings.tls if self.settings.tls is not None else True,
                resolver=Resolver(),
                use_dns_cache=False,
            ),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # our own limits apply
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
        )
        return self._session

    def _note_ends(self, transport: asyncio.BaseTransport | None) -> None:
        if transport is not None:
            ours, theirs = (_host(transport.get_extra_info(which)) for which in ("sockname", "peername"))
            self._ends[self._asked] = (ours, theirs)

    def _cause(self, error: Exception) -> Exception:
        """Returns what a failed exchange means."""
        import aiohttp

        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            certificate_error = error.certificate_error
            reason = getattr(certificate_error, "verify_message", "") or str(certificate_error)
            return InputError(
                f"the certificate of etcd at {self._asked} is not trusted ({reason}): set its CA with cacert=FILE",
                topic="tls-with-etcd-fails",
            )
        tls_error = next((e for e in (cause, cause.__cause__, cause.__context__) if isinstance(e, ssl.SSLError)), None)
        if tls_error is not None and not isinstance(tls_error, ssl.SSLEOFError | ssl.SSLZeroReturnError):
            reason = (tls_error.reason or str(tls_error)).lower().replace("_", " ")
            return InputError(
                f"the TLS handshake with etcd at {self._asked} failed ({reason}): check the rendezvous settings "
                "protocol, cert, key and cacert",
                topic="tls-with-etcd-fails",
            )
        if isinstance(error, aiohttp.ClientResponseError):
            return RendezvousStateError(
                f"the server at {self._asked} does not speak HTTP: is it etcd?",
                topic="something-other-than-etcd-answers",
            )
        if isinstance(error, aiohttp.ServerDisconnectedError) or isinstance(cause, ConnectionResetError | ssl.SSLError):
            # An etcd closes a connection that should not use TLS, or should; so does one that is ending.
            hint = "does it speak TLS?" if self._asked.scheme == "https" else "if it requires TLS, set protocol=https"
            return Elsewhere(f"it closes the connection without an answer ({hint})")
        if isinstance(cause, OSError):  # asyncio has its own words for what the system says; a resolver has no errno
            number = cause.errno or 0
            return Elsewhere(os.strerror(number) if number > 0 else cause.strerror or str(cause))
        return Elsewhere(str(cause) or type(error).__name__)

    async def _who_is(self, answer: HttpAnswer) -> Exception:
        """Returns which server gave an answer that the API does not have."""
        if b"HTTP request to an HTTPS server" in answer.body:
            return InputError(
                f"etcd at {answer.endpoint} requires TLS: add the rendezvous setting protocol=https",
                topic="tls-with-etcd-fails",
            )
        if answer.status == 404 and (version := await self._version()):
            return NoSuchApiError(f"etcd {version} at {answer.endpoint} {self.without_api}")
        return RendezvousStateError(
            f"not an etcd that aelastic supports: {answer}", topic="something-other-than-etcd-answers"
        )

    async def _version(self) -> str:
        """Returns the version of the last endpoint, if it is an etcd; otherwise an empty string."""
        try:
            with anyio.fail_after(self._limit_s):
                answer = await self._exchange(HttpRequest("GET", "/version"))
            version = json.loads(answer.body)["etcdserver"]
        except (Elsewhere, TimeoutError, ValueError, LookupError, TypeError, RecursionError):
            return ""
        return version if isinstance(version, str) and re.fullmatch(r"[\w.+-]{1,40}", version) else ""


def _import_aiohttp() -> None:
    """Imports aiohttp before a limit begins: from a slow disk, or while others import torch, it takes seconds."""
    import aiohttp  # noqa: F401


def _host(address: Any) -> str:
    """Returns the host of a socket's address, without the zone of IPv6."""
    return str(address[0]).partition("%")[0] if isinstance(address, tuple) else ""
