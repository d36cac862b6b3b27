"""The health server: its answers while a job runs, the clients that it rejects, and that no client harms the job."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import os
import re
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
import pytest
from kit.agents import FINISH, Agent, c10d, team_of
from kit.backends import FakeBackend, Plan, StoreStandIn
from kit.launching import Job, Launcher, cmdline, on_each_loop, run, stand_still
from kit.metrics_text import DOCS, values
from kit.ports import quiet_port
from kit.this_process import descriptors, python, threads, until
from kit.verbs import verb
from kit.waiting import DEADLINE_S, wait_for

from aelastic import HealthCheckServer, InputError, Supervisor, WorkerSpec, WorkerState
from aelastic.launch import LaunchConfig, elastic_launch
from aelastic.observe import run_events as ev
from aelastic.observe.exposition import Exposition
from aelastic.observe.health import foreign_server, stacks_endpoint
from aelastic.observe.health import limits as connection_limits
from aelastic.observe.health.address import HEALTH_PORT_VARIABLE, Address, close, listen_at, read_address, url_of
from aelastic.observe.health.server import HealthServer, open_health
from aelastic.observe.observer import Observers
from aelastic.workers.states import Phase

pytestmark = pytest.mark.usefixtures("warm_stores")

ANY_PORT = {HEALTH_PORT_VARIABLE: "0"}
# Opens a server in an agent.
WITH_SERVER = f"import os\nos.environ[{HEALTH_PORT_VARIABLE!r}] = '0'\n"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps a server in this process from treating clients as slow, or a dump as late, on a busy machine."""
    monkeypatch.setattr(connection_limits, "LIFE_S", 600.0)
    monkeypatch.setattr(stacks_endpoint, "TIMEOUT_S", 600.0)


class Answer(NamedTuple):
    """A server's answer."""

    status: int
    headers: dict[str, str]
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


def ask(url: str, method: str = "GET", headers: Mapping[str, str] | None = None, body: bytes | None = None) -> Answer:
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=DEADLINE_S)
    try:
        connection.request(method, f"{place.path or '/'}?{place.query}".rstrip("?"), body, dict(headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, dict(answer.headers), answer.read().decode())
    finally:
        connection.close()


def url_in(job: Job) -> str:
    """The URL that a job reports."""
    found = wait_for(f"a port is told:\n{job.story}", lambda: re.search(r"answered at (http://\S+)", job.stderr))
    return str(found.group(1))


def wait_ready(url: str) -> None:
    wait_for("ready", lambda: ask(f"{url}/readyz").status == 200)


# Addresses.


@pytest.mark.parametrize(
    "text, host, port",
    [
        ("8080", "127.0.0.1", 8080),
        (" 0 ", "127.0.0.1", 0),
        ("0.0.0.0:80", "0.0.0.0", 80),
        ("[::1]:8080", "::1", 8080),
        ("[::]:0", "::", 0),
        ("node7.example:65535", "node7.example", 65535),
    ],
)
def test_an_address_is_a_port_or_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert read_address(text) == Address(text, host, port)


@pytest.mark.parametrize(
    "text, remedy",
    [
        ("http", "use a port of 0 to 65535"),
        ("65536", "use a port of 0 to 65535"),
        ("-1", "use a port of 0 to 65535"),
        ("٣", "use a port of 0 to 65535"),
        ("host:", "use a port of 0 to 65535"),
        (":8080", "0.0.0.0 or [::]"),
        ("::1:8080", "in brackets"),
        ("http://host:80", "in brackets"),
    ],
)
def test_an_address_that_makes_no_sense_is_refused_with_what_to_do(text: str, remedy: str) -> None:
    with pytest.raises(InputError, match=re.escape(remedy)) as caught:
        read_address(text)
    assert str(caught.value).startswith(f"{HEALTH_PORT_VARIABLE}={text}: ")


@pytest.mark.parametrize("text", ["no-such-host.invalid:0", "192.0.2.1:0", f"{'x' * 70}.invalid:0"])
def test_a_host_that_is_not_here_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=re.escape(text)):
        listen_at(read_address(text))


def test_every_kind_of_address_can_be_connected_to() -> None:
    for text in ("0", "localhost:0", "[::1]:0", "0.0.0.0:0"):
        try:
            listener = listen_at(read_address(text))
        except InputError:
            assert text == "[::1]:0" and not socket.has_dualstack_ipv6()
            continue
        with listener:
            place = urlsplit(url_of(listener))
            socket.create_connection((place.hostname or "", place.port or 0), DEADLINE_S).close()


def test_a_port_can_be_had_again_at_once() -> None:
    port = quiet_port()
    listener = listen_at(read_address(str(port)))
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S):
        accepted, _ = listener.accept()
        accepted.close()  # first, so that its remaining state stays on this side
        close(listener)
    close(listen_at(read_address(str(port))))


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=f"^{HEALTH_PORT_VARIABLE}={address}: cannot listen there"):
            listen_at(read_address(address))


async def test_without_what_serves_it_shows_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    with pytest.raises(InputError, match=f"{HEALTH_PORT_VARIABLE}=0 needs aiohttp: pip install aiohttp"):
        async with serving():
            pass


# Content during a job.


FAILS_ONCE = """
say("start", rank, restart, os.environ.get("TORCHELASTIC_HEALTH_CHECK_PORT"))
wait_for(f"go{restart}")
if restart == 0 and rank == 1:
    raise LookupError("no batch left")
"""


@on_each_loop
def test_it_answers_for_a_job_from_its_first_worker_to_its_end(launch: Launcher, loop: str) -> None:
    # A port that stays free when the job is over; the log reports it like any port that was chosen.
    env = {HEALTH_PORT_VARIABLE: str(quiet_port()), "LOGLEVEL": "INFO"}
    options = "--nproc-per-node", "2", "--hang-timeout", "600", "--max-restarts", "2"
    began_at, began_s = time.time(), time.monotonic()
    job = launch(FAILS_ONCE, *options, loop=loop, env=env)
    url = url_in(job)
    assert ask(f"{url}/livez").text == "ok\n"
    wait_ready(url)
    job.wait_line("start", 2)  # until then a worker has hardly any memory
    status = ask(f"{url}/status").json()
    assert (status["phase"], status["state"], status["ready"]) == ("running", "HEALTHY", True)
    assert status["agent"]["pid"] == job.pid and status["run"]["local_world_size"] == 2
    workers = {worker["pid"]: worker for worker in status["workers"]}
    assert workers.keys() == {pid for pid in job.left() if any("worker.py" in word for word in cmdline(pid)[1:3])}
    assert all(worker["rss_bytes"] > 1 << 20 and worker["cpu_s"] >= 0 for worker in workers.values())
    read = values(ask(f"{url}/metrics").text)
    assert (read["aelastic_ready"], read["aelastic_world_size"], read["aelastic_rounds_total"]) == (1, 2, 1)
    assert read['aelastic_phase_duration_seconds_count{phase="rendezvous"}'] == 1
    assert read['aelastic_worker_resident_memory_bytes{local_rank="1",role="default"}'] > 1 << 20
    assert (read["aelastic_leads"], read["aelastic_worker_silence_max_seconds"]) == (1, 600)
    assert 0 <= read['aelastic_worker_silence_seconds{local_rank="1"}'] <= time.monotonic() - began_s
    assert began_at <= read["aelastic_phase_start_time_seconds"] <= time.time()
    stopped = status["workers"][1]["pid"]
    stand_still(stopped)
    assert [worker["kernel"] for worker in ask(f"{url}/status").json()["workers"]] == [None, "stopped"]
    assert "rank 1 is stopped by a signal" in ask(f"{url}/readyz?verbose").text
    assert "rank 1 is stopped by a signal" in verb(job.folder, "status").out
    os.kill(stopped, signal.SIGCONT)
    is_open = ask(f"{url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0, text/plain;q=0.5"})
    assert is_open.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
    assert is_open.text.endswith("# EOF\n")

    (job.folder / "go0").touch()
    wait_for("the restart", lambda: ask(f"{url}/status").json()["restarts"]["failure"] == 1)
    wait_ready(url)
    status = ask(f"{url}/status").json()
    failure = status["last_failure"]
    assert (failure["rank"], failure["generation"], failure["exitcode"]) == (1, 1, 1)
    assert "no batch left" in failure["message"] + failure["traceback"]
    assert status["round"]["restart_count"] == 1 and status["round"]["generation"] == 2
    assert status["restarts"] == {"failure": 1, "membership": 0} and status["last_restart"]["cause"] == "failure"
    assert {"detect", "stop", "rendezvous", "spawn", "run"} <= {phase["phase"] for phase in status["phases"]}
    read = values(ask(f"{url}/metrics").text)
    assert read['aelastic_restarts_total{cause="failure"}'] == 1
    assert read['aelastic_restarts_total{cause="membership"}'] == 0
    assert read['aelastic_worker_exits_total{outcome="failed"}'] == 1
    assert read["aelastic_restart_duration_seconds_count"] == 1
    for phase in ("detect", "stop"):
        assert read[f'aelastic_phase_duration_seconds_count{{phase="{phase}"}}'] == 1

    (job.folder / "go1").touch()
    assert job.wait() == 0
    with pytest.raises(ConnectionRefusedError):
        ask(url)
    # The port is the agent's: workers don't get it.
    assert sorted(job.lines) == [f"start {rank} {restart} None" for rank in (0, 1) for restart in (0, 1)]
    job.assert_nothing_left()


def test_before_the_rendezvous_and_in_the_exit_barrier_it_lives_and_is_not_ready(launch: Launcher) -> None:
    with team_of(launch, c10d(), "2") as team:
        first = team.start(wrapper=WITH_SERVER)
        url = url_in(first)
        assert ask(f"{url}/livez").status == 200
        answer = ask(f"{url}/readyz")
        assert answer.status == 503 and "waiting for a round" in answer.text
        status = ask(f"{url}/status").json()
        assert (status["phase"], status["round"], status["workers"]) == ("joining", None, [])
        assert ask(f"{url}/stacks", "POST").status == 503

        second: Agent = team.start()
        round_ = team.wait_round([first, second])
        wait_ready(url)
        assert ask(f"{url}/status").json()["round"]["group_world_size"] == 2

        ours = first.starts[-1].rank
        round_.send_signal(FINISH, ours)
        wait_for("the barrier", lambda: ask(f"{url}/status").json()["phase"] == "barrier")
        assert ask(f"{url}/livez").status == ask(f"{url}/healthz").status == 200
        answer = ask(f"{url}/readyz")
        assert answer.status == 503 and "those of other nodes run" in answer.text
        round_.send_signal(FINISH, 1 - ours)
        assert (first.wait(), second.wait()) == (0, 0)


# In this process, without a job: pages, stacks, clients.


@asynccontextmanager
async def serving(
    where: str = "0", collect: Callable[[str], Any] | None = None, *, is_running: bool = False
) -> AsyncIterator[tuple[HealthServer, str]]:
    async def nothing(why: str) -> ev.StacksTaken:
        raise AssertionError(why)

    exposition = Exposition(is_local=True)
    server = await open_health(where, None, collect or nothing, lambda: exposition)
    assert isinstance(server, HealthServer)
    observers = Observers([exposition, server])
    if is_running:
        observers.tell(ev.RoundFormed(1, 1, 0, 0, 1, 0, 2, 2), 0.0)
        observers.tell(ev.Changed(Phase.JOINING, Phase.RUNNING, WorkerState.HEALTHY, ""), 0.0)
        observers.tell(ev.WorkersStarted(1, {0: os.getpid(), 1: None}), 0.0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.run)
        yield server, url_of(server._listener)
        tasks.cancel_scope.cancel()
    await server.aclose()


async def ask_here(url: str, *args: Any, **more: Any) -> Answer:
    """Like `ask`, for a server that runs on this loop."""
    return await anyio.to_thread.run_sync(lambda: ask(url, *args, **more), abandon_on_cancel=True)


async def test_each_page_has_its_method_and_others_get_its_name() -> None:
    async with serving() as (server, url):
        assert server._limits is None, "no client has connected yet: code for answers is imported with the first"
        index = await ask_here(url)
        pages = re.findall(r"^([A-Z]+) +(\S+)$", index.text, re.MULTILINE)
        assert {path for _, path in pages} == {"/livez", "/readyz", "/healthz", "/status", "/metrics", "/stacks"}
        for method, path in pages:
            other = "GET" if method == "POST" else "POST"
            refused = await ask_here(url + path, other)
            assert refused.status == 405 and method in refused.headers["Allow"]
        assert (await ask_here(f"{url}/nonsense")).status == 404
        head = await ask_here(f"{url}/livez", "HEAD")
        assert (head.status, head.text, head.headers["Content-Length"]) == (200, "", "3")


@pytest.mark.parametrize(
    "page, headers, status, words",
    [
        ("livez?verbose", {}, 200, "[+]loop ok"),
        ("healthz?verbose", {}, 200, "healthz check passed"),
        ("readyz?verbose", {}, 200, "2 of 2 workers run"),
        ("status", {"Host": "localhost:8080"}, 200, ""),
        ("status", {"Host": "127.0.0.1"}, 200, ""),
        ("status", {"Host": "[::1]:1"}, 200, ""),
        ("status", {"Host": "a.localhost"}, 200, ""),
        ("status", {"Host": "evil.example:80"}, 403, ""),  # on the loopback address
        ("status", {"Host": "["}, 403, ""),
        ("stacks", {"Origin": "https://evil.example"}, 403, ""),  # a web page may not change anything
    ],
)
async def test_who_asks_how_gets_which_answer(page: str, headers: dict[str, str], status: int, words: str) -> None:
    async with serving(is_running=True) as (_, url):
        answer = await ask_here(f"{url}/{page}", "POST" if page == "stacks" else "GET", headers=headers)
    assert (answer.status, words in answer.text) == (status, True)
    assert not [name for name in answer.headers if name.lower().startswith("access-control")]
    if words:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert answer.headers["Cache-Control"] == "no-store"


async def test_at_other_addresses_any_name_may_lead_here_and_without_workers_there_are_no_stacks() -> None:
    async with serving("0.0.0.0:0") as (_, url):
        assert (await ask_here(f"{url}/livez", headers={"Host": "pod-3.jobs.svc"})).status == 200
        answer = await ask_here(f"{url}/stacks", "POST")
        assert (answer.status, "no worker runs" in answer.text) == (503, True)


async def test_every_metric_is_in_the_documents_and_no_other() -> None:
    async with serving() as (_, url):
        text = (await ask_here(f"{url}/metrics")).text
    exposed = [(line.split()[2], line.split()[3]) for line in text.splitlines() if line.startswith("# TYPE")]
    assert re.findall(r"^\| `(aelastic_\w+)` \| (\w+) \|", DOCS.read_text(), re.MULTILINE) == exposed


# Stacks.


class Stacks:
    """Takes stacks when a test allows it, and counts the requests."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.go = folder, 0, anyio.Event()

    async def __call__(self, why: str) -> ev.StacksTaken:
        self.count += 1
        await self.go.wait()
        for rank in (0, 1):
            path = self.folder / str(rank) / "stack.txt"
            path.parent.mkdir(exist_ok=True)
            with path.open("a") as file:
                file.write(f"=== time {self.count} of {rank}\nthread 1: in lock.acquire\n\n")
        return ev.StacksTaken(1, why, {0: "py-spy", 1: "memory"}, str(self.folder))


async def test_clients_that_ask_for_stacks_at_the_same_time_share_one_dump(tmp_path: Path) -> None:
    stacks = Stacks(tmp_path)
    async with serving(collect=stacks, is_running=True) as (server, url):
        asking = asyncio.gather(*(ask_here(f"{url}/stacks", "POST") for _ in range(5)))
        limits = await until(lambda: server._limits)
        await until(lambda: len(limits._answered) == 5)  # all of them wait
        stacks.go.set()
        answers = await asking
    assert stacks.count == 1
    assert {answer.status for answer in answers} == {200}
    (text,) = {answer.text for answer in answers}
    assert "local rank 0, by py-spy" in text and "local rank 1, by memory" in text
    assert text.count("in lock.acquire") == 2


async def test_stacks_come_as_json_and_only_those_of_the_last_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks_endpoint, "INTERVAL_S", 0.0)
    stacks = Stacks(tmp_path)
    stacks.go.set()
    async with serving(collect=stacks, is_running=True) as (_, url):
        await ask_here(f"{url}/stacks", "POST")
        answer = (await ask_here(f"{url}/stacks", "POST", headers={"Accept": "application/json"})).json()
    assert answer["folder"] == str(tmp_path)
    assert [worker["text"].splitlines()[0] for worker in answer["workers"]] == [
        f"=== time 2 of {rank}" for rank in (0, 1)
    ]


async def test_stacks_that_cannot_be_taken_are_an_answer_too() -> None:
    async def fail(why: str) -> ev.StacksTaken:
        raise OSError("no room on the disk")

    async with serving(collect=fail, is_running=True) as (_, url):
        answer = await ask_here(f"{url}/stacks", "POST")
        assert (answer.status, "no room on the disk" in answer.text) == (500, True)
        assert (await ask_here(f"{url}/livez")).status == 200


# Hostile clients.


@contextmanager
def hostile(url: str) -> Iterator[list[socket.socket]]:
    """Clients of every hostile kind, which stay for the duration of the block."""
    place = urlsplit(url)

    def connect(sent: bytes = b"") -> socket.socket:
        client = socket.create_connection((place.hostname or "", place.port or 0), DEADLINE_S)
        client.setblocking(False)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # they reset in the end
        try:
            client.send(sent)
        except OSError:
            pass
        return client

    with ExitStack() as stack:
        yield [
            stack.enter_context(connect(sent))
            for sent in (
                *[b""] * 140,  # silent, and more than there is room for
                *[b"GET /livez HTTP/1.1\r\nX-A: "] * 40,  # never finish their request
                *[b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"] * 40,  # never read
                *[b"POST /stacks HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\n\r\n" + b"x" * 9000]
                * 10,
                *[b"POST /stacks HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffff\r\n"] * 10,
                *[b"GET /livez HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(10_000))] * 10,
                *[b"GET /" + b"x" * 200_000] * 10,
                *[b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"] * 10,  # TLS
                *[b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n" * 1000] * 10,  # a thousand requests each
                *[b"GET /livez HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n" + b"\0" * 9000] * 10,
            )
        ]


# In an agent: it keeps slow clients.  A client that had to wait for their end would exceed the test's deadline.
KEEPS_SLOW = "from aelastic.observe.health import limits\nlimits.LIFE_S = 600.0\n"


@pytest.mark.all
@pytest.mark.ci
@on_each_loop
def test_hostile_clients_keep_neither_others_nor_the_job_waiting(launch: Launcher, loop: str) -> None:
    worker = """
        line = b"x" * 99 + b"\\n"
        while not os.path.exists("go"):
            os.write(1, line * 500)  # a flood of output, too
    """
    job = launch(worker, "--nproc-per-node", "2", loop=loop, env=ANY_PORT, wrapper=KEEPS_SLOW)
    url = url_in(job)
    wait_ready(url)
    files = len(os.listdir(f"/proc/{job.pid}/fd"))
    with hostile(url):
        for path in ("livez", "readyz", "metrics", "status") * 3:
            assert ask(f"{url}/{path}").status == 200
        assert len(os.listdir(f"/proc/{job.pid}/fd")) <= files + connection_limits.CONNECTIONS_MAX + 2
        seen = os.path.getsize(job.folder / "stdout")
        wait_for("the workers' lines go on", lambda: os.path.getsize(job.folder / "stdout") > seen + (1 << 20))
        dropped = 'aelastic_http_connections_dropped_total{reason="crowd"}'
        wait_for("a crowd", lambda: values(ask(f"{url}/metrics").text)[dropped] > 0)
    job.go()
    assert job.wait() == 0
    assert "Traceback" not in job.stderr, job.stderr
    warnings = [line for line in job.stderr.splitlines() if line.startswith("aelastic: W")]
    # Requests for stacks also compared the ranks.
    (_,) = (line for line in warnings if "ranks compared" not in line)
    job.assert_nothing_left()


async def test_a_slow_client_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (_, url):
        place = urlsplit(url)
        clients = [await asyncio.open_connection(place.hostname, place.port) for _ in range(3)]
        clients[1][1].write(b"GET /livez HTTP/1.1\r\nX-A: ")
        clients[2][1].write(b"POST /livez HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n")
        async with asyncio.timeout(DEADLINE_S):
            assert b"405" in await _rest(clients[2][0])
            with monkeypatch.context() as hasty:  # once the client that is not slow has its answer
                hasty.setattr(connection_limits, "LIFE_S", 0.5)
                ends = [await _rest(reader) for reader, _ in clients[:2]]
        for _, writer in clients:
            writer.close()
        assert ends == [b"", b""]
        read = values((await ask_here(f"{url}/metrics")).text)
        assert read['aelastic_http_connections_dropped_total{reason="slow"}'] == 2


async def _rest(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def test_a_request_may_have_a_limited_number_of_bytes() -> None:
    async with serving() as (_, url):
        place = urlsplit(url)
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        head = b"GET /livez HTTP/1.1\r\n"
        fields = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 3000) for number in range(40))
        writer.write(head + fields)
        async with asyncio.timeout(DEADLINE_S):
            assert b"200" not in await _rest(reader)
        writer.close()
        assert (await ask_here(f"{url}/livez")).status == 200


async def test_when_all_places_are_taken_the_oldest_that_has_not_asked_makes_room(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection_limits, "CONNECTIONS_MAX", 4)
    stacks = Stacks(tmp_path)
    async with serving(collect=stacks, is_running=True) as (server, url):
        asking = asyncio.ensure_future(ask_here(f"{url}/stacks", "POST"))  # the oldest, and it has sent its request
        limits = await until(lambda: server._limits)
        await until(lambda: limits._answered)
        place = urlsplit(url)
        silent = [await asyncio.open_connection(place.hostname, place.port) for _ in range(3)]
        await until(lambda: len(limits) == 4)
        assert (await ask_here(f"{url}/livez")).status == 200
        async with asyncio.timeout(DEADLINE_S):
            assert await _rest(silent[0][0]) == b""
        assert len(limits) <= 4
        stacks.go.set()
        assert (await asking).status == 200
        for _, writer in silent:
            writer.close()


async def test_a_connection_is_counted_also_if_the_count_is_taken_while_it_is_made() -> None:
    async with serving() as (server, url):
        assert (await ask_here(f"{url}/livez")).status == 200  # the limits begin with the first connection
        await until(lambda: server._limits is not None and not len(server._limits))
        place = urlsplit(url)
        with socket.create_connection((place.hostname or "", place.port or 0), DEADLINE_S):
            async with asyncio.timeout(DEADLINE_S):
                while not server._limits:
                    await anyio.lowlevel.checkpoint()  # each step of the loop


def test_few_open_files_mean_fewer_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for limit in (16, 256, 1 << 20, -1):
        monkeypatch.setattr("resource.getrlimit", lambda _, limit=limit: (limit, limit))
        found[limit] = connection_limits.connections_max()
    assert found == {16: 4, 256: 32, 1 << 20: 128, -1: 128}


# Leftovers.


@on_each_loop
def test_a_run_with_a_server_gives_everything_back(loop: str, tmp_path: Path) -> None:
    run(loop, asyncio.sleep(0))  # libuv keeps a pipe until the program exits
    gc.collect()  # loops of earlier tests, which would be closed meanwhile
    before = descriptors(), threads()
    status: list[int] = []

    async def main() -> None:
        spec = python(f"import os, time\nwhile not os.path.exists({str(tmp_path / 'go')!r}): time.sleep(0.01)",
                      env={**os.environ, **ANY_PORT})  # fmt: skip
        supervisor = Supervisor(spec)
        async with asyncio.TaskGroup() as tasks:
            task = tasks.create_task(supervisor.run())
            server: Any = await until(lambda: supervisor._health)
            url = url_of(server._listener)
            await until(lambda: supervisor.state is WorkerState.HEALTHY)
            place = urlsplit(url)
            _, writer = await asyncio.open_connection(place.hostname, place.port)  # a connection that stays
            status.append((await ask_here(f"{url}/status")).status)
            (tmp_path / "go").touch()
            await task
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    run(loop, main())
    assert status == [200]
    wait_for(f"no more threads than {before[1]}", lambda: threads() <= before[1])
    assert descriptors() == before[0]


def test_a_run_that_is_refused_after_it_listens_listens_no_more(tmp_path: Path) -> None:
    port = quiet_port()
    (tmp_path / "file").touch()
    spec = python("", log_dir=tmp_path / "file" / "logs", redirects=3, env={HEALTH_PORT_VARIABLE: str(port)})
    with pytest.raises(InputError, match="log folder"):
        run("asyncio", Supervisor(spec).run())
    close(listen_at(read_address(str(port))))


# Custom servers.


class Recorded(HealthCheckServer):
    """Records its calls."""

    made: list[Recorded]

    def __init__(self, alive_callback: Callable[[], int], port: int, timeout: int) -> None:
        super().__init__(alive_callback, port, timeout)
        self.calls: list[str] = []
        self.alive = 0
        self.made.append(self)

    def start(self) -> None:
        self.calls.append("start")
        self.alive = self.alive_callback()

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture(autouse=True)
def _nothing_made() -> None:
    Recorded.made = []


def supervise(given: Any, port: str, after_s: float = 0.0) -> WorkerState:
    spec = WorkerSpec(entrypoint="train.py", env={HEALTH_PORT_VARIABLE: port})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)
        return run(
            "asyncio", Supervisor(spec, backend=FakeBackend([Plan(after_s)]), health_check_server=given).run()
        ).state


def test_a_class_makes_the_server_where_the_variable_asks_for_one() -> None:
    before = int(time.time())
    assert supervise(Recorded, "8123") is WorkerState.SUCCEEDED
    (server,) = Recorded.made
    assert server.calls == ["start", "stop"]
    assert (server._port, server._timeout) == (8123, 60)
    assert before <= server.alive <= time.time()


def test_without_the_variable_a_class_makes_none_and_an_object_is_started_and_stopped_whatever_it_says() -> None:
    assert supervise(Recorded, "") is WorkerState.SUCCEEDED
    assert not Recorded.made
    server = Recorded(lambda: 0, 1, 2)
    assert supervise(server, "nonsense") is WorkerState.SUCCEEDED
    assert server.calls == ["start", "stop"]


@pytest.mark.parametrize("where", ["__init__", "start", "stop"])
def test_a_server_that_raises_is_reported_and_ends_nothing(where: str, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise SystemExit(f"{where} has no port")

    kind = type("Failing", (Recorded,), {where: fail})
    assert supervise(kind, "1") is WorkerState.SUCCEEDED
    assert f"{where} has no port" in caplog.text


@pytest.mark.parametrize("where", ["start", "stop"])
def test_a_server_that_blocks_keeps_no_job_waiting(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign_server, f"{where.upper()}_TIMEOUT_S", 0.05)  # the other one returns, when it gets a CPU
    may_go = threading.Event()
    kind = type("Blocking", (Recorded,), {where: lambda self: may_go.wait()})
    try:
        assert supervise(kind, "1", after_s=0.3) is WorkerState.SUCCEEDED
        assert f"{where} did not return within 0.05 s" in caplog.text
    finally:
        may_go.set()
    wait_for("no thread of it", lambda: not [name for name in threads() if "health check server" in name])


def test_torchs_own_class_and_proxy_work() -> None:
    from torch.distributed.elastic.agent.server import health_check_server as torchs
    from torch.distributed.elastic.agent.server import local_elastic_agent

    if not hasattr(local_elastic_agent, "_AliveCallbackProxy"):
        pytest.skip("this torch's server keeps its callback to itself")
    calls: list[Any] = []

    class Server(torchs.HealthCheckServer):
        def start(self) -> None:
            calls.append(self._port)

        def stop(self) -> None:
            calls.append(self.alive_callback())

    before = int(time.time())
    assert supervise(Server, "8125") is WorkerState.SUCCEEDED
    assert calls[0] == 8125 and before <= calls[1] <= time.time()
    calls.clear()
    proxy = local_elastic_agent._AliveCallbackProxy()
    assert supervise(Server(proxy, 7, 60), "") is WorkerState.SUCCEEDED
    assert calls[0] == 7 and proxy._delegate is not None


def test_a_server_given_to_the_launcher_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Recorded(lambda: 0, 1, 2)
    with socket.create_server(("127.0.0.1", 0)) as taken:  # as such a server would
        monkeypatch.setenv(HEALTH_PORT_VARIABLE, str(taken.getsockname()[1]))
        config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1, max_restarts=0, rdzv_backend="c10d",
                              rdzv_endpoint="localhost:0")  # fmt: skip
        elastic_launch(config, sys.executable, server)("-c", "")
    assert server.calls == ["stop"]
