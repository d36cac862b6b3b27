"""Addresses of host names, for callers that cannot wait for a name server.

A name server that does not answer blocks a lookup for ten seconds or a minute (`resolv.conf(5)`), and nothing ends it
sooner.  So each lookup has its own thread, outside the event loop's pool.  Its callers stop waiting in time, and
neither another lookup nor the end of the loop or of the process waits for it.  Callers that need the same name
meanwhile share its lookup.

The last addresses of each name are remembered: a caller gets them if the name server takes long, or has no answer.  The
lookup continues, and the next caller gets its result.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

import anyio

from aelastic.base.host import daemon_threads
from aelastic.base.host.ports import is_address

# How long to wait if there is an alternative.  A name server nearby answers within this time, so that a host that has
# moved is found at its new address.  While any lookup takes longer, we do not wait for others either.
HEAD_START_S = 0.05
# How many threads there are at most.  Above this nothing is looked up: that many names are without an answer.
LOOK_UPS_MAX = 32
# How many names are remembered.
KNOWN_MAX = 1024


T = TypeVar("T")


class Address(NamedTuple):
    """One address of a host."""

    family: int
    sockaddr: tuple[Any, ...]  # an argument for `socket.bind`, with port 0

    @property
    def host(self) -> str:
        """The address as text."""
        return str(self.sockaddr[0])


class InvalidNameError(socket.gaierror):
    """No host can have that name."""

    def __init__(self) -> None:
        super().__init__(socket.EAI_NONAME, "invalid host name")


class NoAnswerError(socket.gaierror):
    """No name server has answered yet, and the name had no address before."""

    def __init__(self, reason: str) -> None:
        super().__init__(socket.EAI_AGAIN, reason)


class _LookUp(NamedTuple):
    """A lookup in progress."""

    began: float
    answer: Future[list[Address]]


_lock = threading.Lock()
_look_ups: dict[str, _LookUp] = {}  # in order of their beginning
_known: dict[str, list[Address]] = {}  # ordered by the time of the last lookup


async def look_up(host: str, within_s: float) -> list[Address]:
    """Returns the addresses of a host, at least one.  An address is returned as it is, without a thread.

    Args:
        host: a name or an address.
        within_s: how long to wait for a name without a remembered address; 0: as long as for others.

    Raises:
        NoAnswerError: there was no answer in time.
        OSError: there is no such name, or no name server can be reached.
        InvalidNameError: no host can have that name.
    """
    if is_address(host):
        return [Address(socket.AF_INET6 if ":" in host else socket.AF_INET, (host, 0))]
    known = _known.get(host)
    try:
        answer = _begin(host)
        wait_s = _head_start_s()
        if known is None:
            wait_s = max(wait_s, within_s)
        if wait_s > 0:
            with anyio.move_on_after(wait_s):
                return await asyncio.wrap_future(answer)
    except OSError:
        if known is None:
            raise
    if known is None:
        raise NoAnswerError(f"no answer within {within_s:g} s" if within_s else "no answer yet")
    return known


async def connect(host: str, within_s: float, to: Callable[[str], Awaitable[T]]) -> T:
    """Connects to the first address of a host that answers; the loop's own lookup would outlive its caller.

    Args:
        host: a name or an address.
        within_s: as in `look_up`.
        to: connects to an address.

    Raises:
        OSError: there is no address, or the last one does not answer.
    """
    *others, last = await look_up(host, within_s)
    for each in others:
        with suppress(OSError):
            return await to(each.host)
    return await to(last.host)


def forget() -> None:
    """Forgets all addresses."""
    with _lock:
        _known.clear()


def _head_start_s() -> float:
    """Returns how much of the head start is left for the lookup that began first."""
    with _lock:
        first = next(iter(_look_ups.values()), None)
    return HEAD_START_S if first is None else first.began + HEAD_START_S - time.monotonic()


def _begin(host: str) -> Future[list[Address]]:
    """Returns the future result of looking up a name; joins a lookup in progress."""
    with _lock:
        if host in _look_ups:
            return _look_ups[host].answer
        if len(_look_ups) >= LOOK_UPS_MAX:
            raise NoAnswerError(f"{LOOK_UPS_MAX} other names are still being looked up")
        try:
            answer = daemon_threads.begin(partial(_run, host), f"look up {host}")
        except RuntimeError:
            raise NoAnswerError("this host cannot start more threads (ulimit -u, pids.max)") from None
        _look_ups[host] = _LookUp(time.monotonic(), answer)
        return answer


def _run(host: str) -> list[Address]:
    found: list[Address] | None = None
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        found = list(dict.fromkeys(Address(family, sockaddr) for family, _, _, _, sockaddr in infos))
    except ValueError:  # UnicodeError, mostly
        raise InvalidNameError from None
    finally:
        _end(host, found)
    return found


def _end(host: str, found: list[Address] | None) -> None:
    with _lock:
        del _look_ups[host]
        if found is not None:
            _known.pop(host, None)
            _known[host] = found
        if len(_known) > KNOWN_MAX:
            del _known[next(iter(_known))]
