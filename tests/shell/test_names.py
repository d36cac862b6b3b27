"""Names are looked up so that a silent name server delays nothing else."""

from __future__ import annotations

import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
from kit.launching import LOOPS, run
from kit.waiting import DEADLINE_S, wait_for

from aelastic.base.host import names
from aelastic.diagnose.stacks import collectives
from aelastic.errors import InputError, RendezvousConnectionError
from aelastic.rdzv.protocol.codec import DOWNWARD
from aelastic.rdzv.protocol.stream import NoConnectionError, Stream, connect
from aelastic.rdzv.stores.endpoints import Endpoint, addresses_of, local_addresses_of

SOON_S = 0.01  # time limit for a look-up without an answer


class NameServers:
    """This host's name servers: names that they know, and names about which they stay silent."""

    def __init__(self) -> None:
        self.known: dict[str, list[str]] = {}
        self.silent: set[str] = set()
        self.asked = Counter[str]()
        self.speak = threading.Event()  # the silent ones answer

    def getaddrinfo(self, host: str, port: int | None, *_: Any, **__: Any) -> list[Any]:
        self.asked[host] += 1
        if host in self.silent:
            self.speak.wait()
        if host not in self.known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        kind = socket.SOCK_STREAM
        return [
            (socket.AF_INET6 if ":" in each else socket.AF_INET, kind, 6, "", (each, port or 0))
            for each in self.known[host]
        ]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[NameServers]:
    found = NameServers()
    monkeypatch.setattr(socket, "getaddrinfo", found.getaddrinfo)
    monkeypatch.setattr(names, "_known", {})
    try:
        yield found
    finally:
        found.speak.set()
        wait_for("look-ups end", lambda: not names._look_ups)


async def addresses(host: str, within_s: float = DEADLINE_S) -> list[str]:
    return [each.host for each in await names.look_up(host, within_s)]


async def test_an_address_is_its_own_and_is_not_looked_up(servers: NameServers) -> None:
    assert [await names.look_up(each, SOON_S) for each in ("10.0.0.1", "fd00::1")] == [
        [names.Address(socket.AF_INET, ("10.0.0.1", 0))],
        [names.Address(socket.AF_INET6, ("fd00::1", 0))],
    ]
    assert not servers.asked


async def test_a_name_may_have_several_addresses_each_once_and_in_their_order(servers: NameServers) -> None:
    servers.known["node0"] = ["fd00::1", "10.0.0.1", "fd00::1"]
    assert await addresses("node0") == ["fd00::1", "10.0.0.1"]


async def test_an_unknown_name_is_an_error_at_once_and_one_that_cannot_be_another(
    servers: NameServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(socket.gaierror, match="not known"):
        await names.look_up("nobody", DEADLINE_S)
    monkeypatch.undo()
    with pytest.raises(names.InvalidNameError):
        await names.look_up("a..b", DEADLINE_S)
    with pytest.raises(InputError, match="invalid host name"):
        await addresses_of(Endpoint("a..b", 1))


async def test_a_silent_name_server_is_waited_for_in_its_time_and_what_it_says_later_is_known(
    servers: NameServers,
) -> None:
    servers.silent.add("node0")
    for _ in range(2):
        with pytest.raises(names.NoAnswerError, match=r"no answer within 0.01 s"):
            await names.look_up("node0", SOON_S)
    with pytest.raises(RendezvousConnectionError, match=r"cannot resolve .* node0:1: no answer within 0.01 s"):
        await local_addresses_of(Endpoint("node0", 1), SOON_S)
    assert servers.asked == {"node0": 1}, "one look-up at a time"
    servers.known["node0"] = ["10.0.0.1"]
    servers.speak.set()
    assert await addresses("node0") == ["10.0.0.1"]


@pytest.mark.parametrize("loop", LOOPS)
def test_look_ups_that_are_given_up_hold_up_neither_others_nor_the_end_of_the_loop(
    loop: str, servers: NameServers
) -> None:
    silent = [f"silent{number}" for number in range(names.LOOK_UPS_MAX - 1)]
    servers.silent.update(silent)
    servers.known["node0"] = ["10.0.0.1"]

    async def look() -> None:
        for name in silent:
            with pytest.raises(names.NoAnswerError):
                await names.look_up(name, 1e-6)
        assert await addresses("node0") == ["10.0.0.1"]

    rescue = threading.Timer(DEADLINE_S, servers.speak.set)
    rescue.start()
    run(loop, look())
    rescue.cancel()
    assert not servers.speak.is_set(), "the loop waited for them"


async def test_no_more_threads_are_started_than_a_host_has_room_for(
    servers: NameServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "LOOK_UPS_MAX", 1)
    servers.silent.add("silent")
    servers.known["node0"] = ["10.0.0.1"]
    with pytest.raises(names.NoAnswerError):
        await names.look_up("silent", SOON_S)
    with pytest.raises(names.NoAnswerError, match="1 other names are still being looked up"):
        await names.look_up("node0", DEADLINE_S)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(names, "LOOK_UPS_MAX", 2)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(names.NoAnswerError, match="cannot start more threads"):
            await names.look_up("node0", DEADLINE_S)
    assert await addresses("node0") == ["10.0.0.1"]


async def test_the_last_addresses_of_a_name_do_where_its_name_server_says_nothing_or_does_not_know_it_any_more(
    servers: NameServers,
) -> None:
    servers.known["node0"] = ["10.0.0.1"]
    assert await addresses("node0") == ["10.0.0.1"]
    del servers.known["node0"]
    assert await addresses("node0") == ["10.0.0.1"]
    servers.silent.add("node0")
    for _ in range(3):
        assert await addresses("node0") == ["10.0.0.1"]
    servers.known["node0"] = ["10.0.0.2"]
    servers.silent.clear()
    servers.speak.set()
    with anyio.fail_after(DEADLINE_S):
        while await addresses("node0") != ["10.0.0.2"]:
            pass


async def test_of_many_names_the_last_ones_are_remembered(
    servers: NameServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "KNOWN_MAX", 2)
    for name in ("node0", "node1", "node0", "node2"):
        servers.known[name] = ["10.0.0.1"]
        await names.look_up(name, DEADLINE_S)
        wait_for("the look-up has ended", lambda: not names._look_ups)
    assert list(names._known) == ["node0", "node2"]


# Connections.


def new_stream() -> Stream:
    return Stream(Mock(), DOWNWARD)


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which only 127.0.0.1 listens, and no other address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("hosts", [["silent", "127.0.0.1"], ["nobody", "127.0.0.1"], ["127.0.0.1", "silent"]])
def test_a_name_without_an_answer_is_passed_over(loop: str, servers: NameServers, port: int, hosts: list[str]) -> None:
    servers.silent.add("silent")

    async def reach() -> None:
        (await connect(hosts, port, new_stream, DEADLINE_S)).abort()

    run(loop, reach())


async def test_a_name_that_is_all_there_is_is_waited_for(
    servers: NameServers, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.silent.add("node0")
    with pytest.raises(NoConnectionError, match=r"\(node0: no answer within 0.1 s\)") as caught:
        await connect(["node0"], port, new_stream, 0.1)
    assert not caught.value.is_refused
    servers.known["node0"] = ["127.0.0.1"]
    look_up = names.look_up

    async def answer_late(host: str, within_s: float) -> list[names.Address]:
        if within_s == DEADLINE_S:
            servers.speak.set()
        return await look_up(host, within_s)

    monkeypatch.setattr(names, "look_up", answer_late)
    (await connect(["node0"], port, new_stream, DEADLINE_S)).abort()


async def test_a_refusal_counts_beside_a_name_without_an_answer(servers: NameServers) -> None:
    servers.silent.add("silent")
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(NoConnectionError) as caught:
        await connect(["silent", "127.0.0.1"], port, new_stream, DEADLINE_S)
    assert caught.value.is_refused and caught.value.is_here


async def test_a_host_that_has_moved_is_found_by_its_name(servers: NameServers, port: int) -> None:
    """Its old address is tried while the name server is slow; the next attempt finds the new one."""
    servers.known["node0"] = ["127.0.0.2"]
    assert await addresses("node0") == ["127.0.0.2"]
    servers.known["node0"] = ["127.0.0.1"]
    servers.silent.add("node0")
    with pytest.raises(NoConnectionError, match="Connection refused"):
        await connect(["node0"], port, new_stream, DEADLINE_S)
    servers.speak.set()
    wait_for("the look-up has ended", lambda: not names._look_ups)
    (await connect(["node0"], port, new_stream, DEADLINE_S)).abort()


@pytest.mark.parametrize("loop", LOOPS)
def test_a_host_of_nccl_that_no_name_server_tells_holds_up_no_end(
    loop: str, servers: NameServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.silent.add("node0")
    monkeypatch.setattr(collectives, "TIMEOUT_S", SOON_S)
    assert run(loop, collectives.ras_line({collectives.RAS_VARIABLE: "node0:28028"})) == ""
    assert servers.asked["node0"] == 1
