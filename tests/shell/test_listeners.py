"""Where a port listens: at the addresses that others are given, or at all addresses if that fails."""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest

from aelastic.base.host import ports
from aelastic.base.host.ports import LOOPBACKS, HeldPort, listen, listen_at

EVERYWHERE = {"0.0.0.0", "::"}


def addresses(listeners: list[socket.socket]) -> set[str]:
    return {str(each.getsockname()[0]) for each in listeners}


@contextmanager
def listening(port: int, given: list[str]) -> Iterator[list[socket.socket]]:
    listeners = listen_at(port, given)
    yield listeners
    for listener in listeners:
        listener.close()


def can_connect(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=5).close()
    except OSError:
        return False
    return True


def test_it_listens_at_the_addresses_that_others_are_given() -> None:
    with listening(0, ["127.0.0.5", *LOOPBACKS]) as found:
        assert addresses(found) - {"::1"} == {"127.0.0.5", "127.0.0.1"}
        assert len({each.getsockname()[1] for each in found}) == 1, "one port"
        assert found[0].getsockname()[0] == "127.0.0.5"


@pytest.mark.parametrize("given", [[], ["192.0.2.77"], ["127.0.0.5", "192.0.2.77"]])
def test_where_one_address_is_none_of_this_host_it_listens_at_all(given: list[str]) -> None:
    with listening(0, given) as (listener,):
        assert addresses([listener]) <= EVERYWHERE


def test_a_port_in_use_is_refused_and_nothing_stays_open() -> None:
    with closing(listen(0, "127.0.0.5")) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as caught:
            listen_at(port, ["127.0.0.6", "127.0.0.5"])
        assert caught.value.errno == errno.EADDRINUSE
        listen(port, "127.0.0.6").close()


def test_a_held_port_is_nobody_else_s_and_takes_no_connections_until_its_addresses_are_known() -> None:
    with closing(HeldPort()) as port:
        assert not can_connect("127.0.0.1", port.number)
        with pytest.raises(OSError, match="in use"):
            listen_without_sharing(port.number)
        assert port.listen_at(["127.0.0.5"]) and addresses(port.listeners) == {"127.0.0.5"}
        assert can_connect("127.0.0.5", port.number) and not can_connect("127.0.0.6", port.number)
        first = list(port.listeners)
        assert port.listen_at(["127.0.0.6"] * 2) and addresses(port.listeners) == {"127.0.0.6"}
        assert len(port.listeners) == 1, "each is accepted only once"
        assert can_connect("127.0.0.6", port.number)
        assert port.listen_at(["127.0.0.5"]) and port.listeners == first, "it continues as before"
        assert not port.listen_at(["192.0.2.77"]), "not an address of this host"
        assert addresses(port.listeners) == {"127.0.0.5", "127.0.0.6"}, "the known addresses stay"
    assert not can_connect("127.0.0.5", port.number)


def test_a_copy_of_a_socket_that_another_process_has_keeps_no_address_from_a_held_port() -> None:
    """A child serves the workers' store on a copy of the socket, while the announced address changes twice."""
    with closing(HeldPort()) as port:
        port.listen_at(["127.0.0.5"])
        with closing(port.listeners[0].dup()):
            assert port.listen_at(["127.0.0.6"]) and port.listen_at(["127.0.0.5"])
            assert can_connect("127.0.0.5", port.number)


@pytest.mark.parametrize("given", [[], ["192.0.2.77", "127.0.0.1"], ["127.0.0.5", "192.0.2.77"]])
def test_a_held_port_that_cannot_listen_at_its_addresses_listens_at_all(given: list[str]) -> None:
    with closing(HeldPort()) as port:
        assert not port.listen_at(given)
        assert addresses(port.listeners) <= EVERYWHERE
        assert not port.listen_at(["127.0.0.5"]) and can_connect("127.0.0.5", port.number)


def listen_without_sharing(port: int) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


def test_a_port_that_another_process_listens_at_is_not_held() -> None:
    with closing(listen(0, "127.0.0.1")) as taken, pytest.raises(OSError, match="in use"):
        HeldPort(taken.getsockname()[1])


def test_where_a_kernel_lets_nothing_listen_beside_what_holds_a_port_that_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = list[int]()

    def refuse_first(port: int, address: str) -> socket.socket:
        tries.append(port)
        if len(tries) == 1:
            raise OSError(errno.EADDRINUSE, "in use")
        return listen(port, address)

    with closing(HeldPort()) as port:
        monkeypatch.setattr(ports, "listen", refuse_first)
        assert port.listen_at(["127.0.0.5"]) and tries == [port.number] * 2
        assert can_connect("127.0.0.5", port.number)
