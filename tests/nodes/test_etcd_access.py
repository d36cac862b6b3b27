"""etcd with TLS, and with users and passwords."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from kit.servers.etcd_cells import A, Closing, cell_of, renew, resigned, settings_of, until_answered, written
from kit.servers.etcd_servers import EtcdServer, EtcdServers, debian_etcd, distro_etcd, etcd, make_certificates

from aelastic.errors import InputError, RendezvousConnectionError
from aelastic.rdzv.stores.etcd import APIS
from aelastic.rdzv.stores.etcd_settings import etcd_settings

# --- TLS


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("certificates") / "tls")


@pytest.fixture(scope="module")
def tls_servers(
    certificates: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EtcdServer, EtcdServer]]:
    """A server with a certificate, and one that also requires a client certificate."""
    folder = tmp_path_factory.mktemp("etcd-tls")
    with ExitStack() as stack:
        plain, mutual = (
            EtcdServer(
                distro_etcd(), folder / str(wants), ["--enable-v2"], certificates, wants_client_certificate=wants
            )
            for wants in (False, True)
        )
        yield stack.enter_context(etcd(plain)), stack.enter_context(etcd(mutual))


async def test_tls_with_a_ca_of_ones_own(
    tls_servers: tuple[EtcdServer, EtcdServer], certificates: Path, run_id: str, closing: Closing
) -> None:
    plain, mutual = tls_servers
    ca = str(certificates / "ca.pem")
    pair = {"cert": str(certificates / "client.pem"), "key": str(certificates / "client.key")}
    for cell in (
        cell_of("etcd", plain.endpoint, run_id, protocol="https", cacert=ca),
        cell_of("etcd-v2", f"https://localhost:{plain.port}", run_id + "2", ca_cert=ca),
        cell_of("etcd", mutual.endpoint, run_id, cacert=ca, **pair),
    ):
        closing(cell)
        await cell.open()
        await renew(cell, await written(cell, A))


async def test_tls_that_cannot_work_shows_why(
    tls_servers: tuple[EtcdServer, EtcdServer], certificates: Path, etcds: EtcdServers, closing: Closing
) -> None:
    tls, mutual = tls_servers
    ca, other_ca = str(certificates / "ca.pem"), str(certificates / "other-ca.pem")
    wrong = {
        "not trusted .*set its CA": cell_of("etcd", tls.endpoint, protocol="https"),
        "not trusted .*set its CA with cacert": cell_of("etcd", tls.endpoint, cacert=other_ca),
        "the TLS handshake with .*cert": cell_of("etcd", mutual.endpoint, cacert=ca),
    }
    for what, cell in wrong.items():
        with pytest.raises(InputError, match=what):
            await closing(cell).open()
    # It closes the connection, as a server that is shutting down may do.
    with pytest.raises(RendezvousConnectionError, match="does it speak TLS"):
        await closing(cell_of("etcd", etcds.of("distro").endpoint, protocol="https")).open()
    with pytest.raises(RendezvousConnectionError, match="if it requires TLS"):
        await closing(cell_of("etcd", tls.endpoint)).open()


# --- users


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd in which joe may do anything below /aelastic, and mary nothing."""
    with etcd(EtcdServer(distro_etcd(), tmp_path / "etcd", ["--enable-v2"])) as server:
        for name in ("root", "joe", "mary"):
            server.ask("/v3/auth/user/add", {"name": name, "password": f"{name}'s: password"})
        for role in ("root", "jobs"):
            server.ask("/v3/auth/role/add", {"name": role})
        below = {"key": b64encode(b"/aelastic/").decode(), "range_end": b64encode(b"/aelastic0").decode()}
        server.ask("/v3/auth/role/grant", {"name": "jobs", "perm": {"permType": "READWRITE", **below}})
        server.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
        server.ask("/v3/auth/user/grant", {"user": "joe", "role": "jobs"})
        server.ask("/v3/auth/enable", {})
        yield server


async def test_a_user_of_etcd_v3_leads_and_others_get_an_error(
    guarded: EtcdServer, tmp_path: Path, closing: Closing
) -> None:
    (tmp_path / "password").write_text("joe's: password\n")
    endpoint = guarded.endpoint
    joe = closing(cell_of("etcd-v3", endpoint, user="joe", password_file=str(tmp_path / "password")))
    await joe.open()
    mine = await renew(joe, await written(joe, A))
    either = closing(cell_of("etcd", endpoint, user="joe:joe's: password"))
    await either.open()
    assert await either.read() == mine

    for cell in (
        cell_of("etcd-v3", endpoint, user="joe", password="mistaken"),
        cell_of("etcd-v3", endpoint, user="nobody:mistaken"),
        cell_of("etcd-v3", endpoint, user="mary:mary's: password"),
        cell_of("etcd", endpoint, user="mary:mary's: password"),
        cell_of("etcd-v3", endpoint),
        cell_of("etcd-v3", endpoint, user="joe:joe's: password", etcd_prefix="/elsewhere"),
    ):
        with pytest.raises(InputError, match="refused the credentials") as caught:
            await closing(cell).open()
        assert "mistaken" not in str(caught.value) and "s: " not in str(caught.value)

    # An expired token looks like one from before a restart.  A newly started server may take longer to check a password
    # than a request may last.
    guarded.restart()
    mine = await renew(joe, await until_answered(partial(renew, joe, mine)))
    guarded.restart()
    await until_answered(partial(written, joe, resigned(mine)))
    assert await until_answered(either.read) == resigned(mine)  # its token has expired as well


async def test_credentials_that_the_server_does_not_ask_for_do_no_harm(
    etcds: EtcdServers, run_id: str, closing: Closing
) -> None:
    for backend in ("etcd", *APIS):
        cell = closing(cell_of(backend, etcds.of("distro").endpoint, run_id + backend, user="joe", password="x"))
        await cell.open()
        await renew(cell, await written(cell, A))


async def test_a_user_of_etcd_v2_leads_and_others_get_an_error(tmp_path: Path, closing: Closing) -> None:
    with etcd(EtcdServer(debian_etcd(), tmp_path / "etcd", ["--enable-v2"])) as server:
        token = "Basic " + b64encode(b"root:pw").decode()
        server.ask("/v2/auth/users/root", {"user": "root", "password": "pw"}, method="PUT")
        server.ask("/v2/auth/enable", {}, method="PUT")
        everything = {"kv": {"read": ["/*"], "write": ["/*"]}}
        server.ask("/v2/auth/roles/guest", {"role": "guest", "revoke": everything}, method="PUT", token=token)

        cell = closing(cell_of("etcd-v2", server.endpoint, user="root", password="pw"))
        await cell.open()
        await renew(cell, await written(cell, A))
        for config in ({}, {"user": "root:mistaken"}):
            with pytest.raises(InputError, match="refused the credentials"):
                await closing(cell_of("etcd-v2", server.endpoint, **config)).open()


def test_certificates_without_a_protocol_mean_https(tmp_path: Path) -> None:
    certificates = make_certificates(tmp_path / "tls")

    assert etcd_settings(settings_of("a", ca_cert=str(certificates / "ca.pem"))).endpoints[0].scheme == "https"
    assert etcd_settings(settings_of("a", ca_cert="unread", protocol="http")).endpoints[0].scheme == "http"
