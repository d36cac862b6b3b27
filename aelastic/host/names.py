"""Addresses of host names, for callers that cannot wait for a name server.

A name server that does not answer holds up a look-up for ten seconds or a minute (`resolv.conf(5)`), and nothing ends
it sooner.  So each look-up has a thread of its own, outside the event loop's pool.  Its callers stop waiting in time,
and neither another look-up nor the end of the loop or of the process waits for it.  Callers that ask for a name
meanwhile share its look-up.

The last addresses of each name are remembered: a caller gets them if the name server takes long, or has no answer.  The
look-up goes on, and the next caller gets what it has found.
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

from aelastic.host import daemon_threads
from aelastic.host.sockets import is_address

# How long to wait where there is something else to try.  A name server that is near answers within this, and then a
# host that has moved is found where it is now.  While any look-up takes longer, others are not waited for either.
HEAD_START_S = 0.05
# Threads.  Beyond them nothing is looked up: as many names have had no answer.
LOOK_UPS_MAX = 32
# Names whose addresses are remembered.
KNOWN_MAX = 1024


T = TypeVar("T")


class Address(NamedTuple):
    """One address of a host."""

    family: int
    sockaddr: tuple[Any, ...]  # as `socket.bind` takes it, with port 0

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
    """A look-up that is under way."""

    began: float
    answer: Future[list[Address]]


_lock = threading.Lock()
_look_ups: dict[str, _LookUp] = {}  # in the order in which they began
_known: dict[str, list[Address]] = {}  # the one that was looked up last comes last


async def look_up(host: str, within_s: float) -> list[Address]:
    """The addresses of a host, at least one.  An address is its own, and costs no thread.

    Args:
        host: a name or an address.
        within_s: how long to wait for a name that has had no address before; 0: as long as for others.

    Raises:
        NoAnswerError: there was no answer in time.
        OSError: there is no such name, or no name server can be asked.
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
    """Connects to the first address of a host that answers; the loop's own look-up would outlive its caller.

    Args:
        host: a name or an address.
        within_s: as `look_up` has it.
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
    """What is left of it, for the look-up that began first."""
    with _lock:
        first = next(iter(_look_ups.values()), None)
    return HEAD_START_S if first is None else first.began + HEAD_START_S - time.monotonic()


def _begin(host: str) -> Future[list[Address]]:
    """What the look-up of a name will find, that is under way or a new one."""
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
