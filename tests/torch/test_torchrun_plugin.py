"""torchrun's own command with `--rdzv-backend etcd-v3`: its pieces against real servers, then whole jobs."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from kit.launching import DEADLINE_S, LAUNCH_TIMEOUT_S, Job, Launcher, wait_for
from kit.ports import quiet_port
from kit.servers.etcd_servers import EtcdServer, EtcdServers, debian_etcd, distro_etcd, etcd, make_certificates
from kit.workers.torch_workers import TORCHRUN

from aelastic.errors import RendezvousConnectionError
from aelastic.rdzv import torchrun_plugin as for_torchrun
from aelastic.rdzv.boards.etcd_http import EtcdHttp
from aelastic.rdzv.boards.etcd_settings import etcd_settings
from aelastic.rdzv.boards.etcd_v3_calls import EtcdV3Calls
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.torchrun_plugin.keys import JobKeys
from aelastic.rdzv.torchrun_plugin.keys_thread import KeysThread

torch_rdzv: Any = pytest.importorskip("torch.distributed.elastic.rendezvous")
torch_dist: Any = pytest.importorskip("torch.distributed")
handlers: Any = pytest.importorskip("aelastic.rdzv.torchrun_plugin.handler")

pytestmark = pytest.mark.usefixtures("kind_to_etcd")

BINARIES = {"debian": debian_etcd, "distro": distro_etcd}
each_server = pytest.mark.parametrize("server", ["debian", pytest.param("distro", marks=pytest.mark.all)])

# --- what the tests share


def parameters(endpoint: str, run_id: str, nodes: str = "1:1", **config: Any) -> Any:
    """As torchrun makes them."""
    fewest, most = map(int, nodes.split(":"))
    address = config.pop("local_addr", "127.0.0.1")
    config = {"timeout": 900, "last_call_timeout": "1", **config}
    return torch_rdzv.RendezvousParameters("etcd-v3", endpoint, run_id, fewest, most, local_addr=address, **config)


@contextmanager
def handler(endpoint: str, run_id: str, nodes: str = "1:1", **config: Any) -> Iterator[Any]:
    opened = for_torchrun.etcd_v3()(parameters(endpoint, run_id, nodes, **config))
    try:
        yield opened
    finally:
        opened.shutdown()


@contextmanager
def keys_of(endpoint: str, run_id: str, ttl_s: int = 60) -> Iterator[KeysThread]:
    thread = KeysThread(lambda: JobKeys(RendezvousSettings("etcd-v3", endpoint), run_id, ttl_s))
    try:
        yield thread
    finally:
        thread.stop()


@contextmanager
def store_of(endpoint: str, run_id: str) -> Iterator[Any]:
    """A store of a rendezvous that has begun."""
    with keys_of(endpoint, run_id) as thread:
        handlers.EtcdV3Backend(thread).set_state(b"it has begun")
        store = handlers.EtcdV3Store(thread)
        store.set_timeout(timedelta(seconds=DEADLINE_S))
        yield store


def keys_in(server: EtcdServer, beginning: str = "/") -> list[dict[str, Any]]:
    """What etcd holds below a path."""
    first, last = b64encode(beginning.encode()).decode(), b64encode(f"{beginning}\x7f".encode()).decode()
    found: list[dict[str, Any]] = server.ask("/v3/kv/range", {"key": first, "range_end": last}).get("kvs", [])
    return found


def forget(server: EtcdServer, run_id: str) -> None:
    """Lets a job's keys vanish, as when their time is over."""
    folder = etcd_settings(RendezvousSettings("etcd-v3", server.endpoint)).folder(run_id)
    (lease,) = {kv["lease"] for kv in keys_in(server, folder)}
    server.ask("/v3/lease/revoke", {"ID": lease})


@pytest.fixture
def answers_get_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked is asked twice: the first answer does not arrive."""
    request = EtcdHttp._request

    async def request_twice(*args: Any) -> Any:
        await request(*args)
        return await request(*args)

    monkeypatch.setattr(EtcdHttp, "_request", request_twice)


# --- how torch finds it


def test_it_is_found_where_torch_looks_once_aelastic_is_installed() -> None:
    (entry,) = entry_points(group="torchrun.handlers", name="etcd-v3")
    assert entry.load() is for_torchrun.etcd_v3
    assert torch_rdzv.rendezvous_handler_registry._registry["etcd-v3"] is for_torchrun.etcd_v3()


def test_what_torch_imports_with_its_rendezvous_imports_nothing_more() -> None:
    code = (
        "import __future__, importlib, sys, typing; before = set(sys.modules)\n"  # what the package itself needs
        "import aelastic.rdzv.torchrun_plugin\n"
        "print(sorted(set(sys.modules) - before))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert seen.stdout == "['aelastic', 'aelastic.rdzv', 'aelastic.rdzv.torchrun_plugin']\n"


def test_torchs_rendezvous_is_imported_without_a_word_even_where_aiohttp_is_missing() -> None:
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['aiohttp', 'anyio', 'uvloop', 'aiofiles']))\n"
        "from torch.distributed.elastic.rendezvous import rendezvous_handler_registry\n"
        "print('etcd-v3' in rendezvous_handler_registry._registry)"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert (seen.stdout, seen.stderr) == ("True\n", "")


# --- the state: torch's contract of a RendezvousBackend


@each_server
def test_the_state_is_written_by_compare_and_swap(etcds: EtcdServers, server: str, run_id: str) -> None:
    endpoint = etcds.of(server).endpoint
    with keys_of(endpoint, run_id) as ours, keys_of(endpoint, run_id) as theirs:
        a, b = handlers.EtcdV3Backend(ours), handlers.EtcdV3Backend(theirs)
        assert a.name == "etcd-v3"
        assert a.get_state() is None
        state, token, is_ours = a.set_state(b"\x80 one")
        assert (state, is_ours) == (b"\x80 one", True)
        assert a.get_state() == b.get_state() == (b"\x80 one", token)
        assert b.set_state(b"two") == (b"\x80 one", token, False), "there is a state already"
        state, later, is_ours = b.set_state(b"two", token)
        assert (state, is_ours) == (b"two", True) and later != token
        for stale in (token, "no token", 0, -1, later + 1):
            assert a.set_state(b"three", stale) == (b"two", later, False)
        assert a.get_state() == (b"two", later)


def test_no_state_is_written_over_one_that_is_gone(etcds: EtcdServers, run_id: str) -> None:
    with keys_of(etcds.of("distro").endpoint, run_id) as thread:
        backend = handlers.EtcdV3Backend(thread)
        assert backend.set_state(b"one", 17) is None
        assert backend.set_state(b"one", "no token") is None
        assert backend.get_state() is None


@pytest.mark.usefixtures("answers_get_lost")
def test_what_is_written_though_the_answer_was_lost_is_known_as_ours(etcds: EtcdServers, run_id: str) -> None:
    with keys_of(etcds.of("distro").endpoint, run_id) as thread:
        backend = handlers.EtcdV3Backend(thread)
        state, token, is_ours = backend.set_state(b"one")
        assert (state, is_ours) == (b"one", True)
        state, token, is_ours = backend.set_state(b"two", token)
        assert (state, is_ours) == (b"two", True)
        assert backend.get_state() == (b"two", token)


def test_a_key_that_no_agent_wrote_is_no_state(etcds: EtcdServers, run_id: str) -> None:
    server = etcds.of("distro")
    key = RendezvousSettings("etcd-v3", server.endpoint)
    with keys_of(server.endpoint, run_id) as thread:
        name = JobKeys(key, run_id, 60)._state_key
        server.ask("/v3/kv/put", {"key": b64encode(name.encode()).decode(), "value": ""})
        with pytest.raises(torch_rdzv.RendezvousStateError, match=r"was not written by an aelastic agent .* delete it"):
            handlers.EtcdV3Backend(thread).get_state()


# --- the agents' store


@each_server
def test_the_store_does_what_torchs_agents_ask_of_one(etcds: EtcdServers, server: str, run_id: str) -> None:
    with store_of(etcds.of(server).endpoint, run_id) as plain:
        for store in (plain, torch_dist.PrefixStore("round.1", plain)):
            assert not store.check(["a"])
            store.set("a", "text")
            store.set("ä/b", b"\x00\xff")
            assert store.get("a") == b"text"
            assert store.multi_get(["ä/b", "a"]) == [b"\x00\xff", b"text"]
            assert store.check(["a", "ä/b"]) and not store.check(["a", "c"])
            store.wait(["a", "ä/b"])
            assert [store.add("n", 2), store.add("n", 40), store.add("n", -2)] == [2, 42, 40]
            assert store.get("n") == b"40"
            assert store.compare_set("c", "something", "new") == b"something" and not store.check(["c"])
            assert store.compare_set("c", "", "new") == b"new"
            assert store.compare_set("c", "new", "newer") == b"newer"
            assert store.compare_set("c", "new", "wrong") == b"newer" == store.get("c")
            store.multi_set(["x", "y"], ["1", "2"])
            assert store.multi_get(["x", "y"]) == [b"1", b"2"]
            assert store.delete_key("c") and not store.delete_key("c")
        assert plain.num_keys() == 2 * len(["a", "ä/b", "n", "x", "y"])


def test_more_keys_are_got_than_etcd_takes_in_one_question(etcds: EtcdServers, run_id: str) -> None:
    with store_of(etcds.of("distro").endpoint, run_id) as store:
        keys = [f"agent{rank}" for rank in range(256)]
        store.multi_set([*keys, "agent", "agents"], [*keys, "before", "after"])
        assert store.multi_get(keys) == [key.encode() for key in keys]
        assert store.multi_get(keys[::-1]) == [key.encode() for key in keys[::-1]]
        assert store.check(keys) and not store.check([*keys, "agent1000"])


def test_many_add_to_one_number_at_once(etcds: EtcdServers, run_id: str) -> None:
    endpoint = etcds.of("distro").endpoint
    with store_of(endpoint, run_id) as one, store_of(endpoint, run_id) as other, ThreadPoolExecutor(8) as pool:
        sums = list(pool.map(lambda n: (one, other)[n % 2].add("members", 1), range(40)))
    assert sorted(sums) == list(range(1, 41))


@pytest.mark.usefixtures("answers_get_lost")
def test_nothing_is_added_twice_though_an_answer_was_lost(etcds: EtcdServers, run_id: str) -> None:
    with store_of(etcds.of("distro").endpoint, run_id) as store:
        assert [store.add("members", 1) for _ in range(3)] == [1, 2, 3]
        assert store.compare_set("c", "", "new") == b"new"


@each_server
def test_a_caller_that_waits_is_notified_and_does_not_poll(
    etcds: EtcdServers, server: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches, looks = threading.Semaphore(0), []
    wait_change, look = EtcdV3Calls.wait_change, JobKeys._look

    async def wait_change_and_say(self: Any, *args: Any) -> bool:
        watches.release()
        return await wait_change(self, *args)

    async def look_and_count(self: Any, *args: Any, **keywords: Any) -> Any:
        looks.append(args)
        return await look(self, *args, **keywords)

    endpoint = etcds.of(server).endpoint
    with store_of(endpoint, run_id) as store, store_of(endpoint, run_id) as other, ThreadPoolExecutor() as pool:
        monkeypatch.setattr(EtcdV3Calls, "wait_change", wait_change_and_say)
        monkeypatch.setattr(JobKeys, "_look", look_and_count)
        values = pool.submit(store.multi_get, ["first", "second"])
        for key in ("first", "second"):
            assert watches.acquire(timeout=DEADLINE_S)
            other.set(key, "is here")
        assert values.result(DEADLINE_S) == [b"is here", b"is here"]
    assert len(looks) == 3, "at first, and after each of the two came"


def test_a_caller_that_waits_in_vain_hears_when_the_time_is_over(etcds: EtcdServers, run_id: str) -> None:
    with store_of(etcds.of("distro").endpoint, run_id) as store:
        with pytest.raises(torch_dist.DistStoreError, match=r"b, c did not come within 0.2 s"):
            store.wait(["b", "c"], timedelta(seconds=0.2))
        store.set_timeout(timedelta(seconds=0.1))
        with pytest.raises(torch_dist.DistStoreError, match=r"r/b did not come within 0.1 s"):
            torch_dist.PrefixStore("r", store).get("b")


def test_nothing_is_stored_before_a_node_takes_part(etcds: EtcdServers, run_id: str) -> None:
    with (
        keys_of(etcds.of("distro").endpoint, run_id) as thread,
        pytest.raises(torch_dist.DistNetworkError, match="join the rendezvous before using the store"),
    ):
        handlers.EtcdV3Store(thread).set("a", "b")


def test_a_thread_that_was_stopped_starts_again_and_tells_its_callers(etcds: EtcdServers, run_id: str) -> None:
    with keys_of(etcds.of("distro").endpoint, run_id) as thread, ThreadPoolExecutor() as pool:
        thread.call(JobKeys.write_state, b"one", None)
        waits = pool.submit(thread.call, JobKeys.wait, ["nothing"])
        wait_for("it waits", waits.running)
        thread.stop()
        with pytest.raises(RendezvousConnectionError, match="shut down meanwhile"):
            waits.result(DEADLINE_S)
        assert thread.call(JobKeys.state) is not None
    assert not [each for each in threading.enumerate() if each.name == "etcd-v3"]


# --- leases


@each_server
def test_the_keys_live_as_long_as_an_agent_and_vanish_after_it(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = threading.Semaphore(0)
    note_kept = JobKeys._note_kept

    def note_and_say(*args: Any) -> None:
        note_kept(*args)
        kept.release()

    monkeypatch.setattr(JobKeys, "_note_kept", note_and_say)
    with etcd(EtcdServer(BINARIES[server](), tmp_path / "etcd")) as own:
        with handler(own.endpoint, "job", ttl="2") as agent:
            info = agent.next_rendezvous()
            info.store.set("a", "b")
            before = keys_in(own)
            assert {kv["lease"] for kv in before} == {before[0]["lease"]}
            for _ in range(6):  # three in each lease
                assert kept.acquire(timeout=DEADLINE_S)
            assert len(keys_in(own)) == len(before)
        assert keys_in(own), "for nodes that come late, the job is over"
        wait_for("nothing is left", lambda: not keys_in(own))
        assert not own.ask("/v3/lease/leases", {}).get("leases")


def test_reading_keeps_nothing_alive(etcds: EtcdServers, run_id: str) -> None:
    with keys_of(etcds.of("distro").endpoint, run_id, 2) as one, keys_of(etcds.of("distro").endpoint, run_id, 2) as two:
        one.call(JobKeys.write_state, b"closed", None)
        assert two.call(JobKeys.state) is not None
        one.stop()
        wait_for("it vanishes", lambda: two.call(JobKeys.state) is None)


def test_what_became_of_an_agent_whose_keys_are_gone_is_said(
    etcds: EtcdServers, run_id: str, caplog: pytest.LogCaptureFixture
) -> None:
    server = etcds.of("distro")
    with keys_of(server.endpoint, run_id, 2) as thread:
        thread.call(JobKeys.write_state, b"one", None)
        forget(server, run_id)
        with pytest.raises(RendezvousConnectionError, match="keys expired"):
            thread.call(JobKeys.put, "a", b"b")
        wait_for("a word", lambda: "keys expired" in caplog.text)
        assert thread.call(JobKeys.write_state, b"one", None) is not None, "a new rendezvous"


# --- the handler


@pytest.mark.long
@pytest.mark.all
def test_a_run_id_is_closed_until_etcd_forgets_it_and_new_after_that(etcds: EtcdServers, run_id: str) -> None:
    server = etcds.of("distro")
    for _ in range(20):
        with handler(server.endpoint, run_id) as agent:
            info = agent.next_rendezvous()
            assert (info.rank, info.world_size, agent.get_run_id()) == (0, 1, run_id)
            assert agent.get_backend() == "etcd-v3"
            assert agent.use_agent_store and not agent.is_closed() and agent.num_nodes_waiting() == 0
            store = info.store
            assert store.add("exit barrier", 1) == 1, "of no earlier run"
        with (
            handler(server.endpoint, run_id) as late,
            pytest.raises(torch_rdzv.RendezvousClosedError, match=r"use another --rdzv-id, or wait .* 60 s after"),
        ):
            late.next_rendezvous()
        forget(server, run_id)


def test_new_workers_find_a_store_without_the_words_of_dead_ones(etcds: EtcdServers, run_id: str) -> None:
    with handler(etcds.of("distro").endpoint, run_id) as agent:
        first = agent.next_rendezvous().bootstrap_store_info
        workers = torch_dist.TCPStore(first.master_addr, first.master_port, is_master=False)
        workers.set("default_pg/0", "the address of a worker that will be dead")
        second = agent.next_rendezvous().bootstrap_store_info
        workers = torch_dist.TCPStore(second.master_addr, second.master_port, is_master=False)
        assert not workers.check(["default_pg/0"])


def test_all_nodes_send_their_workers_to_one_store_though_a_newcomer_becomes_the_first(
    etcds: EtcdServers, run_id: str
) -> None:
    endpoint = etcds.of("distro").endpoint
    with (
        ThreadPoolExecutor() as pool,  # it waits for its thread: the handlers are shut down before
        handler(endpoint, run_id, "1:2", local_addr="127.0.0.2") as old,
        handler(endpoint, run_id, "1:2", local_addr="127.0.0.1") as new,  # torch sorts by address
    ):
        assert old.next_rendezvous().world_size == 1
        newcomer = pool.submit(new.next_rendezvous)
        wait_for("a node waits", old.num_nodes_waiting)
        # However long one of them takes to see the new round, it is not the other's alone.
        for each in (old, new):
            each._rendezvous._settings.timeout._last_call = timedelta(seconds=DEADLINE_S)
        infos = [old.next_rendezvous(), newcomer.result(DEADLINE_S)]
        assert [(info.rank, info.world_size) for info in infos] == [(1, 2), (0, 2)]
        places = {(i.bootstrap_store_info.master_addr, i.bootstrap_store_info.master_port) for i in infos}
        assert {address for address, _ in places} == {"127.0.0.1"} and len(places) == 1


def test_without_a_shared_store_the_workers_make_their_own(
    etcds: EtcdServers, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with handler(etcds.of("distro").endpoint, run_id) as agent:
        where = agent.next_rendezvous().bootstrap_store_info
        assert not agent.use_agent_store
        with pytest.raises(ConnectionRefusedError):
            connect(where.master_port)


def connect(port: int) -> None:
    socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S).close()


def test_an_etcd_that_is_away_stops_no_workers_and_a_newcomer_waits_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        etcd(EtcdServer(distro_etcd(), tmp_path / "etcd")) as own,
        handler(own.endpoint, "job", "1:2") as agent,
        ThreadPoolExecutor() as pool,
    ):
        store = agent.next_rendezvous().store
        own.kill()
        waits = pool.submit(store.get, "a")
        # torch looks once in a second.
        wait_for("a word", lambda: agent.num_nodes_waiting() == 0 and "the workers continue" in caplog.text)
        assert agent.num_nodes_waiting() == 0
        said = [record for record in caplog.records if "etcd does not answer; the workers continue" in record.message]
        assert len(said) == 1 and "Connection refused" in said[0].message
        again = pool.submit(agent.next_rendezvous)
        own.start()
        assert again.result(2 * DEADLINE_S).world_size == 1
        store.set("a", "b")
        assert waits.result(DEADLINE_S) == b"b"


# --- what cannot work


@pytest.mark.parametrize(
    "endpoint, config, message",
    [
        ("", {}, "needs --rdzv-endpoint HOST:PORT"),
        ("http://a:b", {}, "etcd endpoint http://a:b: use host:port"),
        ("a:1", {"protocol": "gopher"}, "protocol=gopher: use http or https"),
        ("a:1", {"protocol": "https", "cacert": "/none.pem"}, "cacert=/none.pem: No such file"),
        ("a:1", {"password": "secret"}, "password, but no user: add user=NAME"),
        ("a:1", {"ttl": "1"}, "ttl=1: use a number of seconds, 2 or more"),
        ("a:1", {"ttl": "soon"}, "ttl=soon: use a number of seconds, 2 or more"),
        ("a:1", {"join_timeout": "soon"}, "join_timeout=soon: use a number above 0"),
        ("a:1", {"join_timeout": "1.5"}, "'join_timeout' does not represent a valid integer"),
    ],
)
def test_a_setting_that_cannot_work_is_refused_before_a_server_is_asked(
    endpoint: str, config: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        for_torchrun.etcd_v3()(parameters(endpoint, "job", **config))


@each_server
def test_of_several_endpoints_one_that_answers_is_enough(etcds: EtcdServers, server: str, run_id: str) -> None:
    endpoints = f"127.0.0.1:{quiet_port()},{etcds.of(server).endpoint}"
    with handler(endpoints, run_id) as agent:
        assert agent.next_rendezvous().world_size == 1
    assert RendezvousSettings("torch:etcd-v3", endpoints).endpoint == endpoints


def test_a_handler_that_is_let_go_of_leaves_no_thread(etcds: EtcdServers, run_id: str) -> None:
    agent = for_torchrun.etcd_v3()(parameters(etcds.of("distro").endpoint, run_id))
    agent.next_rendezvous()
    del agent
    wait_for("its thread has ended", lambda: "etcd-v3" not in {each.name for each in threading.enumerate()})


# The first import of aiohttp takes longer than etcd has for an answer.
SLOW_IMPORT = """
import sys, time

class Slow:
    def find_spec(self, name, path=None, target=None):
        if name == "aiohttp":
            sys.meta_path.remove(self)
            time.sleep(2.5)

sys.meta_path.insert(0, Slow())
"""


def test_a_slow_import_does_not_count_against_etcd(etcds: EtcdServers, run_id: str) -> None:
    code = (
        f"{SLOW_IMPORT}\nimport asyncio\nfrom aelastic.rdzv.boards import etcd_http, etcd_v3\n"
        "from aelastic.rdzv.settings import RendezvousSettings\n"
        f"settings = RendezvousSettings('etcd-v3', {etcds.of('distro').endpoint!r})\n"
        f"board = etcd_v3.EtcdV3Board(settings, {run_id!r})\n"
        "async def main():\n    await board.open()\n    await board.aclose()\n"
        "asyncio.run(main()); assert etcd_http.ANSWER_LIMIT_S < 2.5"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_server_that_starts_late_is_waited_for_a_while(tmp_path: Path) -> None:
    server = EtcdServer(distro_etcd(), tmp_path / "etcd", port=quiet_port())
    with ThreadPoolExecutor() as pool:
        opening = pool.submit(for_torchrun.etcd_v3(), parameters(server.endpoint, "job"))
        with etcd(server):
            opening.result(DEADLINE_S).shutdown()


def test_where_no_etcd_answers_it_is_said_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handlers, "OPEN_PATIENCE_S", 0.1)
    unserved = f"127.0.0.1:{quiet_port()}"
    with pytest.raises(
        torch_rdzv.RendezvousConnectionError, match=f"{unserved}: Connection refused.*check its servers"
    ):
        for_torchrun.etcd_v3()(parameters(unserved, "job"))
    assert not [each for each in threading.enumerate() if each.name == "etcd-v3"]


@each_server
def test_an_etcd_without_its_gateway_is_told_apart(server: str, tmp_path: Path) -> None:
    with (
        etcd(EtcdServer(BINARIES[server](), tmp_path / "etcd", ["--enable-grpc-gateway=false"])) as own,
        pytest.raises(torch_rdzv.RendezvousConnectionError, match=r"etcd 3\.\d.*start it without --enable-grpc-ga"),
    ):
        for_torchrun.etcd_v3()(parameters(own.endpoint, "job"))


def test_torchrun_ends_with_the_same_words(launch: Launcher) -> None:
    unserved = f"127.0.0.1:{quiet_port()}"
    (job,) = torchrun(launch, unserved, [[]])
    assert job.wait(LAUNCH_TIMEOUT_S) == 1
    assert f"RendezvousConnectionError: no answer from etcd ({unserved}: Connection refused)" in job.stderr


# --- whole jobs

WORKER = """
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    say("sum", int(tensor), "rank", dist.get_rank(), "of", dist.get_world_size())
    {between}
    dist.all_reduce(tensor)
    say("done", dist.get_rank())
    dist.destroy_process_group()
"""
FAILS_ONCE = WORKER.format(
    between="""
    dist.barrier()  # every rank has said its sum
    if os.environ["RANK"] == sys.argv[1] and not os.path.exists(sys.argv[2]):
        open(sys.argv[2], "w").close()
        os._exit(3)
"""
)


def torchrun(
    launch: Launcher,
    endpoint: str,
    agents: Sequence[Sequence[str]],
    worker: str = WORKER.format(between=""),
    *,
    run_id: str = "job",
    nnodes: str = "",
    conf: str = "",
    args: Sequence[str] = (),
    program: Callable[[int], str] = lambda index: TORCHRUN,
) -> list[Job]:
    """Agents of one job.

    Args:
        agents: for each, further options.
        program: which module is the agent.
    """
    script = launch.write("worker.py", worker)
    jobs = []
    for options in agents:
        index = len(launch.jobs)
        module = program(index)
        folder = launch.folder / f"agent{index}"
        folder.mkdir()
        command = [
            launch.warm.python if module == TORCHRUN else sys.executable, "-m", module,
            f"--nnodes={nnodes or len(agents)}", "--max-restarts=1", "--local-addr=127.0.0.1",
            f"--rdzv-backend={'torch:' if module == 'aelastic' else ''}etcd-v3",
            f"--rdzv-endpoint={endpoint}", f"--rdzv-id={run_id}",
            f"--rdzv-conf=last_call_timeout=1{',' if conf else ''}{conf}",
            *options, str(script), *args,
        ]  # fmt: skip
        jobs.append(Job(folder, command, {"OMP_NUM_THREADS": "1", "LOGLEVEL": "INFO", **launch.warm.env}))
        launch.jobs.append(jobs[-1])
    return jobs


def said(job: Job, where: str, words: str) -> bool:
    return words in getattr(job, where)


def assert_done(jobs: Sequence[Job], world_size: int, starts: int = 1) -> None:
    """Every agent ended well, and every worker of one world of this size."""
    codes = [job.wait(LAUNCH_TIMEOUT_S) for job in jobs]
    story = "\n".join(job.story for job in jobs)
    assert set(codes) == {0}, story
    lines = [line for job in jobs for line in job.lines]
    assert sorted(line for line in lines if line.startswith("done")) == sorted(f"done {r}" for r in range(world_size))
    whole = [line for line in lines if line.startswith(f"sum {world_size} ")]
    assert sorted(whole) == sorted([f"sum {world_size} rank {r} of {world_size}" for r in range(world_size)] * starts)


@pytest.mark.timeout(LAUNCH_TIMEOUT_S + 20)
@pytest.mark.parametrize("server, nodes", [("debian", 2), ("debian", 3), ("distro", 2), ("distro", 3)])
def test_torchrun_agents_form_a_job(launch: Launcher, etcds: EtcdServers, server: str, nodes: int, run_id: str) -> None:
    jobs = torchrun(launch, etcds.of(server).endpoint, [["--nproc-per-node=2"]] * nodes, run_id=run_id)
    assert_done(jobs, 2 * nodes)


@pytest.mark.timeout(LAUNCH_TIMEOUT_S + 20)
def test_two_jobs_on_one_etcd_do_not_meet(launch: Launcher, etcds: EtcdServers, run_id: str) -> None:
    endpoint = etcds.of("distro").endpoint
    both = [torchrun(launch, endpoint, [[], []], run_id=run_id + name) for name in ("", "2")]
    for jobs in both:
        assert_done(jobs, 2)


@pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S + 20)
@each_server
def test_a_node_joins_a_job_that_runs(launch: Launcher, etcds: EtcdServers, server: str, run_id: str) -> None:
    worker = WORKER.format(between="while dist.get_world_size() < 2: time.sleep(1)")
    endpoint = etcds.of(server).endpoint
    (first,) = torchrun(launch, endpoint, [[]], worker, run_id=run_id, nnodes="1:2")
    wait_for("the first node runs alone", lambda: "sum 1 rank 0 of 1" in first.lines, LAUNCH_TIMEOUT_S)
    (second,) = torchrun(launch, endpoint, [[]], worker, run_id=run_id, nnodes="1:2")
    assert_done([first, second], 2)


@pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S + 20)
@pytest.mark.parametrize("which_fails", ["0", "2"])
@pytest.mark.all
def test_a_worker_that_fails_restarts_those_of_all_nodes(
    launch: Launcher, etcds: EtcdServers, which_fails: str, run_id: str
) -> None:
    marker = str(launch.folder / "failed")
    options = [["--nproc-per-node=2"]] * 2
    jobs = torchrun(launch, etcds.of("distro").endpoint, options, FAILS_ONCE, run_id=run_id, args=[which_fails, marker])
    assert_done(jobs, 4, starts=2)


@pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S + 20)
@pytest.mark.parametrize(
    "which_fails", ["none", pytest.param("0", marks=pytest.mark.all), pytest.param("3", marks=pytest.mark.all)]
)
def test_a_torchrun_agent_and_ours_do_one_job(
    launch: Launcher, etcds: EtcdServers, which_fails: str, run_id: str
) -> None:
    jobs = torchrun(
        launch,
        etcds.of("debian").endpoint,
        [["--nproc-per-node=2"]] * 2,
        FAILS_ONCE,
        run_id=run_id,
        args=[which_fails, str(launch.folder / "failed")],
        program=lambda index: ("torch.distributed.run", "aelastic")[index],
    )
    assert_done(jobs, 4, starts=1 if which_fails == "none" else 2)
    assert not jobs[1].left(), jobs[1].left_described()


@pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S + 20)
@each_server
def test_a_job_goes_on_while_etcd_is_restarted(launch: Launcher, server: str, tmp_path: Path) -> None:
    worker = WORKER.format(between="wait_for(sys.argv[1])")
    with etcd(EtcdServer(BINARIES[server](), tmp_path / "etcd")) as own:
        jobs = torchrun(launch, own.endpoint, [[], []], worker, args=[str(launch.folder / "go")])
        for job in jobs:
            wait_for("a worker works", partial(said, job, "stdout", "sum 2 "), LAUNCH_TIMEOUT_S)
        own.kill()
        for job in jobs:
            wait_for("its agent notices", partial(said, job, "stderr", "the workers continue"))
        own.start()
        launch.folder.joinpath("go").touch()
        assert_done(jobs, 2)


@pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S + 20)
@pytest.mark.all
def test_a_run_id_is_used_again_once_its_keys_are_gone(launch: Launcher, etcds: EtcdServers, run_id: str) -> None:
    server = etcds.of("distro")
    assert_done(torchrun(launch, server.endpoint, [[]], run_id=run_id, conf="ttl=20"), 1)
    (late,) = torchrun(launch, server.endpoint, [[]], run_id=run_id, conf="ttl=20")
    assert late.wait(LAUNCH_TIMEOUT_S) == 1
    assert "is closed, since its job has ended: use another --rdzv-id" in late.stderr
    with keys_of(server.endpoint, run_id) as thread:
        wait_for("etcd forgets it", lambda: thread.call(JobKeys.state) is None)
    assert_done(torchrun(launch, server.endpoint, [[]], run_id=run_id, conf="ttl=20"), 1)


@pytest.mark.timeout(2 * LAUNCH_TIMEOUT_S + 20)
@each_server
def test_a_job_meets_over_tls_with_a_user_of_etcd(launch: Launcher, server: str, tmp_path: Path) -> None:
    (tmp_path / "password").write_text("joe's: password\n")
    certificates = make_certificates(tmp_path / "tls")
    with etcd(EtcdServer(BINARIES[server](), tmp_path / "etcd")) as own:
        add_joe(own)
        own.kill()
        own.tls = certificates
        own.start()
        tls = f"protocol=https,cacert={certificates / 'ca.pem'}"
        jobs = torchrun(launch, own.endpoint, [[], []], conf=f"{tls},user=joe,password_file={tmp_path / 'password'}")
        assert_done(jobs, 2)
        for conf, message in (
            ("protocol=https", "not trusted .*name its CA, cacert=FILE"),
            (tls, "refused the credentials .*add the rendezvous setting user"),
            (f"{tls},user=joe,password=mistaken", "refused the credentials .*has another password"),
        ):
            config = dict(each.split("=") for each in conf.split(","))
            with pytest.raises(ValueError, match=message):
                for_torchrun.etcd_v3()(parameters(own.endpoint, "job", **config))


def add_joe(server: EtcdServer) -> None:
    """Users, and one that may write below our prefix only."""
    for name, password in (("root", "root's password"), ("joe", "joe's: password")):
        server.ask("/v3/auth/user/add", {"name": name, "password": password})
    for role in ("root", "jobs"):
        server.ask("/v3/auth/role/add", {"name": role})
    first, last = (b64encode(text).decode() for text in (b"/aelastic/", b"/aelastic0"))
    permission = {"permType": "READWRITE", "key": first, "range_end": last}
    server.ask("/v3/auth/role/grant", {"name": "jobs", "perm": permission})
    server.ask("/v3/auth/user/grant", {"user": "root", "role": "root"})
    server.ask("/v3/auth/user/grant", {"user": "joe", "role": "jobs"})
    server.ask("/v3/auth/enable", {})
