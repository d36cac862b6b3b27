"""Checks of the rendezvous endpoints: what their names resolve to, what answers there, whether this host can serve one.

An endpoint of this host is bound for a moment, and released.  If something answers, it is asked whether it is a
TCPStore, by a child process that ends with the checks; etcd is asked for the run's key.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import replace

from aelastic.base.host.ports import is_loopback, listen
from aelastic.cli.doctor.finding import Finding
from aelastic.cli.doctor.secret_checks import check_access, secret_of
from aelastic.errors import AelasticError, RendezvousConnectionError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores.endpoints import Endpoint, RefusedError, addresses_of, local_address_of, probe
from aelastic.rdzv.stores.register_cells import MARK, cell_from_bytes
from aelastic.rdzv.stores.tcp_store import TcpStore, run_key

# How long a server that accepts a connection may take to answer as a TCPStore.
ANSWER_TIMEOUT_S = 10.0


def check_endpoints(settings: RendezvousSettings, run_id: str, environ: Mapping[str, str]) -> AsyncIterator[Finding]:
    """Yields one finding for each endpoint, and one for all of them if necessary."""
    if settings.backend in {"etcd", "etcd-v2", "etcd-v3"}:
        return _check_etcd(settings, run_id)
    if settings.backend.removeprefix("torch:") in {"c10d", "static"}:
        return _check_stores(settings, run_id, environ)
    return _check_nothing(settings.backend)


async def _check_nothing(backend: str) -> AsyncIterator[Finding]:
    yield Finding("warning", "rendezvous", f"{backend} is a handler of torch or another package: not checked")


async def _check_stores(
    settings: RendezvousSettings, run_id: str, environ: Mapping[str, str]
) -> AsyncIterator[Finding]:
    settings = replace(settings, endpoint=settings.endpoint or "localhost")
    endpoints = [Endpoint(*each) for each in settings.endpoints]
    store, text = TcpStore(endpoints[0], run_id, environ, ANSWER_TIMEOUT_S), b""
    try:
        for endpoint in endpoints:
            store.endpoint = endpoint
            yield await _check_store(store, settings)
            text = text or await _text_of(store, run_id)
    finally:
        await store.aclose()
    if len(endpoints) > 1:
        many, is_odd = len(endpoints), len(endpoints) % 2 == 1
        words = f"{many} of them: the job survives the loss of {(many - 1) // 2}"
        words += "" if is_odd else f", as with {many - 1}: give an odd number"
        yield Finding("ok" if is_odd else "warning", "endpoints", words)
    if settings.max_nodes > 1:
        async for finding in check_access(settings, run_id, text):
            yield finding


async def _text_of(store: TcpStore, run_id: str) -> bytes:
    """Returns the record of the run in a store that answers."""
    if not store.is_connected:
        return b""
    with suppress(AelasticError, ValueError):
        text = await store.get(run_key(run_id, "leader")) or b""
        vote = cell_from_bytes(text)[0].vote if text.startswith(MARK) else None
        return text if not text.startswith(MARK) else vote.text if vote else b""
    return b""


async def _check_store(store: TcpStore, settings: RendezvousSettings) -> Finding:
    endpoint = store.endpoint
    subject = f"endpoint {endpoint}"
    try:
        found = dict.fromkeys((family, str(sockaddr[0])) for family, sockaddr in await addresses_of(endpoint))
        own = await local_address_of(endpoint)
    except AelasticError as error:
        return Finding("error", subject, str(error))
    where = f"{', '.join(address for _, address in found)}, {'another host' if own is None else 'this host'}"
    finding = None if own is None else _check_own(endpoint, own, subject, where, settings)
    finding = finding or await _ask_store(store, subject, where)
    if finding.level == "error" or settings.has_several_endpoints or settings.max_nodes == 1:
        return finding
    if own is not None and is_loopback(own):
        words = f"{finding.words}; no other host can reach it at {own}: use a name that other hosts resolve"
        return finding.replace(level="warning", words=words)
    if len({family for family, _ in found}) < len(found):
        words = f"{finding.words}; if they belong to several hosts, list each of them"
        return finding.replace(level="warning", words=words)
    return finding


def _check_own(endpoint: Endpoint, own: str, subject: str, where: str, settings: RendezvousSettings) -> Finding | None:
    """Checks whether this host can serve the endpoint; `None` if it cannot tell, as another process has the port."""
    if settings.config.get("is_host") is not None:
        return None
    try:
        listen(endpoint.port, own if is_loopback(own) else "").close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        why = os.strerror(error.errno or 0)
        return Finding("error", subject, f"{where}; it cannot be served ({why}): choose another port")
    return Finding("ok", subject, f"{where}; the port is free: the agent of this host will serve it")


async def _ask_store(store: TcpStore, subject: str, where: str) -> Finding:
    try:
        await store.connect()
    except RefusedError:
        return Finding(
            "warning", subject,
            f"{where}; connection refused: no agent serves it yet, or a firewall blocks it: start the agent there",
        )  # fmt: skip
    except RendezvousConnectionError as error:
        way = f"nc -vz {store.endpoint.host} {store.endpoint.port}"
        return Finding("error", subject, f"{where}; {error}: is the host up and the port open ({way})?")
    except AelasticError as error:
        return Finding("error", subject, f"{where}; {error}")
    return Finding("ok", subject, f"{where}; a TCPStore answers")


async def _check_etcd(settings: RendezvousSettings, run_id: str) -> AsyncIterator[Finding]:
    from aelastic.rdzv.protocol.writing import NotTrustedError
    from aelastic.rdzv.stores.endpoint_cell import EndpointCell
    from aelastic.rdzv.stores.etcd import etcd_store
    from aelastic.rdzv.stores.etcd_settings import etcd_settings

    for each in etcd_settings(settings).endpoints:
        endpoint = Endpoint(each.host, each.port)
        try:
            way = await probe(endpoint)
        except AelasticError as error:
            words = f"{error}: is etcd running there, and is the port open?"
            yield Finding("error", f"endpoint {endpoint}", words)
        else:
            yield Finding("ok", f"endpoint {endpoint}", f"{way.address}; the port is open")
    store = etcd_store(settings, run_id)
    cell = EndpointCell(store, secret_of(settings, run_id), settings.lease_s)
    try:
        with suppress(NotTrustedError):  # a separate line reports it
            await cell.read()
    except AelasticError as error:
        yield Finding("error", "etcd", str(error))
    else:
        yield Finding("ok", "etcd", f"{cell.name} answers")
        if settings.max_nodes > 1:
            async for finding in check_access(settings, run_id, await store.get()):
                yield finding
    finally:
        await cell.aclose()
