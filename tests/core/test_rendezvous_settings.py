"""The user's rendezvous settings: valid numbers, and endpoints."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.errors import InputError
from aelastic.rdzv import registry
from aelastic.rdzv.settings import (
    BACKENDS,
    JOIN_TIMEOUT_S,
    KEYS,
    LAST_CALL_TIMEOUT_S,
    LEASE_S,
    SETTLE_TIME_S,
    RendezvousSettings,
    is_used,
    split_endpoint,
)

TIMES = ["join_timeout", "last_call_timeout", "lease", "settle_time", "keep_alive_interval", "keep_alive_max_attempt"]


def c10d(config: dict[str, str] | None = None, **others: Any) -> RendezvousSettings:
    given = {"backend": "c10d", "endpoint": "node0", "min_nodes": 1, "max_nodes": 2, **others}
    return RendezvousSettings(config=config or {}, **given)


def test_the_defaults_are_torchs_where_torch_has_them() -> None:
    settings = c10d()
    assert settings.join_timeout_s == JOIN_TIMEOUT_S == 600.0
    assert settings.last_call_timeout_s == LAST_CALL_TIMEOUT_S == 30.0
    assert (settings.lease_s, settings.settle_time_s) == (LEASE_S, SETTLE_TIME_S)


def test_each_time_is_taken_as_it_is_given() -> None:
    settings = c10d(config={"join_timeout": "7", "last_call_timeout": "0.5", "lease": "1e1", "settle_time": " 2 "})
    times = (settings.join_timeout_s, settings.last_call_timeout_s, settings.lease_s, settings.settle_time_s)
    assert times == (7.0, 0.5, 10.0, 2.0)


@pytest.mark.parametrize("name", TIMES)
@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "-inf", "1e999", "", "soon", "5s", "0x5", "1,5"])
def test_a_time_that_cannot_work_is_refused(name: str, text: str) -> None:
    with pytest.raises(InputError) as caught:
        c10d(config={name: text})
    assert str(caught.value) == f"rendezvous setting {name}={text}: use a number above 0; times are in seconds"


@given(st.sampled_from(TIMES), st.text(max_size=8))
def test_any_text_is_a_time_above_0_or_refused(name: str, text: str) -> None:
    try:
        settings = c10d(config={name: text})
    except InputError:
        return
    for time in (settings.join_timeout_s, settings.last_call_timeout_s, settings.lease_s, settings.settle_time_s):
        assert 0 < time < float("inf")


def test_the_lease_is_also_an_interval_and_how_many_may_be_missed() -> None:
    assert c10d(config={"keep_alive_interval": "2", "keep_alive_max_attempt": "4"}).lease_s == 8.0
    assert c10d(config={"keep_alive_interval": "2"}).lease_s == 6.0
    assert c10d(config={"keep_alive_max_attempt": "2"}).lease_s == 10.0
    assert c10d(config={"keep_alive_interval": "2", "lease": "3"}).lease_s == 3.0


def test_the_guard_waits_for_a_lease_and_a_second_where_another_round_may_begin_and_otherwise_as_configured() -> None:
    assert c10d(max_nodes=2, config={"lease": "3"}).guard_timeout_s == 4.0
    assert c10d(max_nodes=1).guard_timeout_s is None
    assert c10d(max_nodes=2, config={"guard_timeout": "60"}).guard_timeout_s == 60.0
    assert c10d(max_nodes=1, config={"guard_timeout": "60"}).guard_timeout_s == 60.0
    assert c10d(max_nodes=2, config={"guard_timeout": "0"}).guard_timeout_s is None


def test_what_is_for_the_back_end_is_not_an_error() -> None:
    assert c10d(config={"is_host": "maybe", "store_type": "x", "protocol": ""}).join_timeout_s == JOIN_TIMEOUT_S


PRODUCT = "settings keep_alive_interval times keep_alive_max_attempt are"


@pytest.mark.parametrize(
    "given, expected",
    [
        *(
            ({"min_nodes": fewest, "max_nodes": most}, f"nodes are {fewest}:{most}: use MIN:MAX, at least 1 and ")
            for fewest, most in ((0, 1), (-1, 1), (2, 1), (0, 0))
        ),
        ({"node_rank": -1}, "node_rank is -1: count from 0"),
        *(
            (
                {"backend": "static", "endpoint": "node0:1", "min_nodes": 2, "node_rank": rank},
                f"node rank is {rank} with 2 nodes: rendezvous static needs --node-rank 0 to 1",
            )
            for rank in (None, 2, 3)
        ),
        *(
            ({"config": {"keep_alive_interval": size, "keep_alive_max_attempt": size}}, f"rendezvous {PRODUCT}")
            for size in ("1e200", "1e-200")
        ),
        (
            {"config": {"guard_timeout": "soon"}},
            "rendezvous setting guard_timeout=soon: use a number of 0 or more; times are in seconds",
        ),
        (
            {"config": {"guard_timeout": "4.9"}},
            "rendezvous setting guard_timeout=4.9: use at least the lease, 5, or 0 for never",
        ),
        *(
            (
                {"config": {"endpoints": "3"}, "backend": backend},
                "rendezvous setting endpoints=3: use --rdzv-endpoint to list the endpoints, HOST:PORT of each",
            )
            for backend in ("c10d", "torch:c10d")
        ),
    ],
)
def test_what_cannot_work_is_refused_with_what_would(given: dict[str, Any], expected: str) -> None:
    with pytest.raises(InputError) as caught:
        c10d(**given)
    assert str(caught.value).startswith(expected)


def test_a_node_rank_beyond_the_number_of_nodes_is_a_name() -> None:
    assert (c10d(node_rank=0).node_rank, c10d(node_rank=99).node_rank) == (0, 99)


def test_a_record_that_is_wrong_in_itself_is_a_mistake_of_the_program() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nodes'"):
        RendezvousSettings(backend="c10d", nodes=2)  # type: ignore[call-arg]


# Endpoints.


@pytest.mark.parametrize(
    "endpoint, found",
    [
        ("node0:1", ("node0", 1)),
        ("node0", ("node0", 29400)),
        ("10.0.0.1:65535", ("10.0.0.1", 65535)),
        ("[fd00::1]:29400", ("fd00::1", 29400)),
        ("[fd00::1]", ("fd00::1", 29400)),
        ("[fe80::1%eth0]:5", ("fe80::1%eth0", 5)),
        ("my_host-2.example.com:08080", ("my_host-2.example.com", 8080)),
        ("localhost:0", ("localhost", 0)),
    ],
)
def test_an_endpoint_is_a_host_and_a_port(endpoint: str, found: tuple[str, int]) -> None:
    assert split_endpoint(endpoint, 29400) == found


@pytest.mark.parametrize(
    "endpoint",
    [
        "", ":", ":5", "a:", "a:b", "a:-1", "a:1:2", "fd00::1", "[fd00::1", "fd00::1]:5", "[]:5", "a b:1", "a:1\n", "a:1 ",
        "a/b:1", "a,b:1", "http://a:1", "a:٣", "a:100000000", ":1", "a,b", "::1",
    ],
)  # fmt: skip
def test_what_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(InputError, match=r"rendezvous endpoint .*: use HOST:PORT, an IPv6 address in brackets"):
        split_endpoint(endpoint, 29400)


@pytest.mark.parametrize(
    "endpoint, why", [("a:65536", "the highest port is 65535"), ("a", "the port is missing: use a:PORT")]
)
def test_a_port_is_needed_where_there_is_no_usual_one_and_exists(endpoint: str, why: str) -> None:
    with pytest.raises(InputError, match=f"rendezvous endpoint {endpoint}: {why}"):
        split_endpoint(endpoint)


@pytest.mark.parametrize("backend", ["c10d", "torch:c10d"])
def test_torchs_backoff_may_be_0_and_finite(backend: str) -> None:
    for text in ("0", "0.0", "1.5"):
        given = RendezvousSettings(backend=backend, endpoint="h:1", config={"cas_backoff_max_seconds": text})
        assert given.config["cas_backoff_max_seconds"] == text
    for text in ("-1", "inf", "nan", "soon", ""):
        with pytest.raises(InputError, match=r"cas_backoff_max_seconds=.*: use a number of 0 or more"):
            RendezvousSettings(backend=backend, endpoint="h:1", config={"cas_backoff_max_seconds": text})


def test_what_endpoints_is_to_a_handler_of_another_package_is_its_own_matter() -> None:
    assert c10d(config={"endpoints": "a+b"}, backend="mine").config["endpoints"] == "a+b"


# The table of keys.


class Recorded(dict[str, str]):
    """A config that records which keys are read."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_key_that_a_back_end_reads_is_in_the_table(backend: str) -> None:
    config = Recorded()
    rank = 0 if backend == "static" else None
    settings = RendezvousSettings(backend, "node0:1", 1 if rank is None else 2, 2, node_rank=rank, config=config)
    look_at_all(settings)
    registry._FACTORIES[backend](settings, registry.AgentContext("job", {}, None))  # does not connect yet
    assert {"join_timeout", "lease"} < config.asked <= KEYS.keys()


def look_at_all(settings: RendezvousSettings) -> None:
    for name, kind in vars(RendezvousSettings).items():
        if isinstance(kind, property):
            getattr(settings, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_that_a_back_end_does_not_use_may_have_any_value(backend: str) -> None:
    rank = 0 if backend == "static" else None
    for key, value in itertools.product(sorted(KEYS.keys() - {"secret_file"}), ["5'", "", "nan", "-1"]):
        is_checked = is_used(key, backend) and key.endswith((*TIMES, "timeout", "seconds", "endpoints", "survivor"))
        with pytest.raises(InputError, match=f"{key}={value}: use") if is_checked else nullcontext():
            look_at_all(RendezvousSettings(backend, "node0:1", 2, 2, node_rank=rank, config={key: value}))
