"""etcd settings, and keys in etcd that are not a leader's cell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.servers.etcd_cells import cell_of, settings_of
from kit.servers.etcd_values import GARBAGE, GOOD

from aelastic.errors import InputError
from aelastic.rdzv.protocol.codec import WireError, from_text
from aelastic.rdzv.stores.etcd_settings import Endpoint, etcd_settings

# --- what the user chose


@pytest.mark.parametrize(
    "text, endpoints",
    [
        ("node0", [Endpoint("http", "node0", 2379)]),
        ("Node0.example:1234", [Endpoint("http", "Node0.example", 1234)]),
        ("http://a,https://b:1/", [Endpoint("http", "a", 2379), Endpoint("https", "b", 1)]),
        (" a , b:2 ,", [Endpoint("http", "a", 2379), Endpoint("http", "b", 2)]),
        ("[::1],[fe80::1]:7", [Endpoint("http", "::1", 2379), Endpoint("http", "fe80::1", 7)]),
    ],
)
def test_endpoints_are_read_as_people_write_them(text: str, endpoints: list[Endpoint]) -> None:
    assert list(etcd_settings(settings_of(text)).endpoints) == endpoints


def test_an_endpoint_is_shown_as_it_is_written() -> None:
    cell = cell_of("etcd-v3", "a,[::1]:7")

    assert cell.name == "etcd-v3 at a:2379,[::1]:7"
    assert cell_of("etcd", "a").name == "etcd at a:2379"
    assert (cell.own_address, cell.endpoint_host) == ("", "")


@pytest.mark.parametrize(
    "endpoint, config, what",
    [
        ("", {}, "needs"),
        (" , ", {}, "needs an endpoint"),
        ("a:0", {}, "a:0: use host:port"),
        ("a:65536", {}, "use host:port"),
        ("a:" + "9" * 9000, {}, "use host:port"),
        ("a:b", {}, "use host:port"),
        ("::1", {}, "in brackets"),
        ("[a]", {}, "in brackets"),
        ("a/b", {}, "use host:port"),
        ("a b", {}, "use host:port"),
        ("ftp://a", {}, "http:// or https://"),
        ("http://a", {"protocol": "https"}, "set the protocol once"),
        ("joe:pw@a:1", {}, "password_file"),
        ("a", {"protocol": "gopher"}, "protocol=gopher: use http or https"),
        ("a", {"password": "pw"}, "without a user"),
        ("a", {"user": "joe"}, "without a password"),
        ("a", {"user": "joe:pw", "password": "pw"}, "given twice"),
        ("a", {"user": "joe", "password_file": "/nonexistent/file"}, "password_file=/nonexistent/file: No such file"),
        ("a", {"etcd_prefix": "/a/../b"}, "etcd_prefix"),
        ("a", {"etcd_prefix": "/"}, "etcd_prefix"),
        ("a", {"cacert": "/nonexistent/ca"}, "cacert=/nonexistent/ca: No such file"),
        ("a", {"cacert": "/dev/null"}, "cacert=/dev/null"),
        ("a", {"cert": "/nonexistent/cert"}, "cert=/nonexistent/cert: No such file"),
        ("a", {"ssl_cert": "/dev/null", "ssl_cert_key": "/dev/null"}, "cert=/dev/null,key=/dev/null"),
        ("a", {"key": "/dev/null"}, "without cert"),
    ],
)
def test_what_cannot_work_is_reported_at_once(endpoint: str, config: dict[str, str], what: str) -> None:
    with pytest.raises(InputError, match=what) as caught:
        cell_of("etcd", endpoint, **config)
    assert "pw" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_password_comes_from_a_file_without_its_end_of_line(tmp_path: Path) -> None:
    (tmp_path / "password").write_text(" p:w \n")
    chosen = etcd_settings(settings_of("a", user="joe", password_file=str(tmp_path / "password")))

    assert (chosen.user, chosen.password) == ("joe", " p:w ")
    assert etcd_settings(settings_of("a", user="joe:p:w")).password == "p:w"


# --- what is in the key

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["cell", "leader", "term", "committed", "port", "x"]), inner)
        | inner.map(lambda fields: ["StoredCell", fields])
    ),
    max_leaves=8,
)


@given(st.text() | json_values.map(json.dumps))
def test_nothing_else_is_read_as_a_cell(text: str) -> None:
    with pytest.raises(WireError, match=r"\w"):
        from_text(text)


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_not_a_cell(text: bytes) -> None:
    with pytest.raises(WireError, match=r"\w"):
        from_text(text.decode(errors="replace"))


@pytest.mark.parametrize("committed", [7, "x", [1, 2], ["StoredCell", {}], {"id": [1, 2, "1f", "d"]}])
def test_a_cell_with_something_else_than_an_entry_is_none(committed: object) -> None:
    kind, fields = GOOD
    with pytest.raises(WireError, match=r"^StoredCell\.cell\.committed\b"):
        from_text(json.dumps([kind, {**fields, "cell": {**fields["cell"], "committed": committed}}]))


def test_what_an_older_version_has_left_is_not_a_cell() -> None:
    candidate = {"node_id": "a", "addresses": ["h"], "port": 1, "token": "t"}
    for left in ({"epoch": 1, "candidate": candidate, "verdict": ""}, 0):
        with pytest.raises(WireError, match="not a message of the protocol"):
            from_text(json.dumps(left))


def test_what_a_cell_does_not_have_is_refused() -> None:
    kind, fields = GOOD
    assert from_text(json.dumps(GOOD)).cell.term == 1
    with pytest.raises(WireError, match=r"^StoredCell is .* and should have the fields cell, leader"):
        from_text(json.dumps([kind, {**fields, "later": 1}]))
