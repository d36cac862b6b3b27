"""The workers' store: ready in time on the port that they are given, new for every generation, and never in the way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher, alive, cmdline, on_each_loop, run
from kit.ports import listening, quiet_port
from kit.servers.stores import in_each_store
from kit.waiting import wait_for
from kit.warm.interpreters import Warm

from aelastic import Supervisor, WorkerSpec, WorkerState
from aelastic.rdzv.protocol.listening import outward_addresses
from aelastic.result import RunResult
from aelastic.workers.tcpstore.host import HEAD_START_S

SERVER = "workers/tcpstore/server.py"
HERE = {"127.0.0.1"} | ({"::1"} if socket.has_dualstack_ipv6() else set())

# torch's own client, loaded in a fifth of the time that `import torch` takes.
CLIENT = """
from aelastic.workers.tcpstore.server import import_store
from datetime import timedelta

host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

Store = import_store("quick")


def connect():
    return Store(host_name=host, port=port, is_master=False, timeout=timedelta(seconds=30))
"""


def servers(job: Job) -> list[int]:
    return [pid for pid in job.left() if SERVER in " ".join(cmdline(pid))]


@on_each_loop
def test_workers_meet_on_the_masters_port_in_a_store_of_each_generations_own(launch: Launcher, loop: str) -> None:
    """Each connects from its own loopback address, with more data than fits into a packet."""
    job = launch(
        CLIENT
        + f"""
host = {sorted(HERE)}[-rank]
store = connect()
say(restart, rank, "finds", store.check([f"from {{rank}}"]))
store.set(f"from {{rank}}", str(rank * 11) * 500_000)
say(restart, rank, "read", store.get(f"from {{1 - rank}}").decode() == str(11 - rank * 11) * 500_000)
store.add("have read", 1)
while store.add("have read", 0) < 2:
    time.sleep(0.01)
sys.exit(0 if restart == 1 else 1)
""",
        *("--standalone", "--nproc-per-node", "2", "--max-restarts", "1"),
        loop=loop,
    )
    assert job.wait() == 0, job.story
    each = [(restart, rank) for restart in range(2) for rank in range(2)]
    assert sorted(job.lines) == [f"{who} {rank} {what}" for who, rank in each for what in ("finds False", "read True")]
    job.assert_nothing_left()


@pytest.mark.all
def test_clients_that_come_before_the_store_wait_for_it_also_where_the_quick_way_to_torch_fails(
    launch: Launcher,
) -> None:
    env = in_each_store(
        launch.folder / "site",
        "import time\n    if sys.orig_argv[-1] == 'quick': os.abort()\n"
        "    while not os.path.exists('connected'): time.sleep(0.01)",
    )
    job = launch(
        CLIENT
        + """
import socket
for _ in range(20):
    socket.create_connection((host, port), timeout=10).close()
import threading
assert not os.path.exists("connected")
threading.Timer(0.2, lambda: open("connected", "w").close()).start()
store = connect()
store.set("key", "value")
say("got", store.get("key").decode())
wait_for("go")
""",
        env=env,
    )
    job.wait_line("got value")
    assert [cmdline(pid)[-1] for pid in servers(job)] == ["careful"]
    job.go()
    assert job.wait() == 0, job.story
    job.assert_nothing_left()


LISTENS = """
say("at", os.environ["MASTER_ADDR"])
wait_for("go")
"""


@pytest.mark.parametrize(
    "options, master",
    [
        ("--standalone", "localhost"),
        pytest.param("--master-addr 127.0.0.1 --master-port PORT", "127.0.0.1", marks=pytest.mark.all),
        pytest.param("--rdzv-backend c10d --rdzv-endpoint localhost:PORT", "127.0.0.1", marks=pytest.mark.all),
        (
            "--rdzv-backend c10d --rdzv-endpoint localhost:PORT --nnodes 1:2 --local-addr 127.0.0.1 --rdzv-conf last_call_timeout=0.1",
            "127.0.0.1",
        ),
    ],
)
def test_a_job_that_is_on_this_host_only_listens_on_loopback_only(launch: Launcher, options: str, master: str) -> None:
    job = launch(LISTENS, *options.replace("PORT", str(quiet_port())).split())
    (line,) = job.wait_line("at")
    assert line == f"at {master}"
    addresses = set[str]().union(*listening(job.left()).values())
    assert "127.0.0.1" in addresses
    assert addresses <= HERE
    job.go()
    assert job.wait() == 0, job.story


def test_a_job_that_other_hosts_may_join_listens_for_them(launch: Launcher) -> None:
    # Others may know this host under another name, while its endpoint is `localhost` here.
    endpoint = f"localhost:{quiet_port()}"
    job = launch(LISTENS, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--nnodes", "1:2",
                 "--rdzv-conf", "last_call_timeout=0.1")  # fmt: skip
    job.wait_line("at")
    found = listening(job.left())
    assert len(found) == 4, "the rendezvous, the coordinator, its votes, the workers' store"
    everywhere, outward = {"0.0.0.0", "::"}, set(outward_addresses())
    assert [port for port, addresses in found.items() if addresses & everywhere] == [int(endpoint.partition(":")[2])]
    assert not outward or [addresses & outward for addresses in found.values()].count(outward) == 1, "the coordinator"
    job.go()
    assert job.wait() == 0, job.story


def test_a_store_is_started_when_a_worker_connects_and_none_before_and_replaced_when_it_is_killed(
    launch: Launcher,
) -> None:
    # On a shared machine, other jobs may load torch at any time.
    blind = "import anyio, aelastic.workers.tcpstore.host as host\nhost._torch_loaded = anyio.sleep_forever"
    source = """
say("ready")
wait_for("connect")
connect().set("key", "value")
say("first")
wait_for("go")
say("second", connect().check(["key"]))
"""
    job = launch(CLIENT + source, wrapper=blind)
    job.wait_line("ready")
    time.sleep(3 * HEAD_START_S)  # by then a store that does not wait for a worker would have started
    assert not servers(job)
    (job.folder / "connect").touch()
    job.wait_line("first")
    (first,) = servers(job)
    os.kill(first, signal.SIGKILL)
    wait_for("the store's process dead", lambda: not alive(first))
    job.go()
    assert job.wait() == 0, job.story
    assert job.lines == ["ready", "first", "second False"]
    job.assert_nothing_left()


def test_a_store_is_started_when_a_worker_loads_torch(launch: Launcher) -> None:
    elsewhere = """
    from types import SimpleNamespace
    import aelastic.workers.tcpstore.host as host
    found = SimpleNamespace(submodule_search_locations=["torch"])
    host.importlib = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: found))
    """
    (launch.folder / "job" / "torch" / "lib").mkdir(parents=True)
    (launch.folder / "job" / "torch" / "lib" / "libtorch_cpu.so").touch()
    # Repeatedly: the agent may begin to watch the file after the first worker gets here.
    job = launch(
        """
        while not os.path.exists("over"):
            open("torch/lib/libtorch_cpu.so").close()
            time.sleep(0.01)
        """,
        wrapper=elsewhere,
    )
    wait_for("a store", lambda: servers(job))
    (job.folder / "over").touch()
    assert job.wait() == 0, job.story


@pytest.mark.all
def test_without_torch_the_port_is_closed_that_is_reported_and_the_next_generation_may_have_a_store(
    launch: Launcher,
) -> None:
    env = in_each_store(launch.folder / "site", "sys.modules.update({} if os.path.exists('go') else {'torch': None})")
    job = launch(
        CLIENT
        + """
import socket
while restart == 0:
    try:
        socket.create_connection((host, port), 10).close()
    except ConnectionRefusedError:
        say("refused")
        wait_for("go")
        sys.exit(1)
    time.sleep(0.02)
store = connect()
store.set("key", "value")
say("got", store.get("key").decode())
""",
        "--max-restarts",
        "1",
        env=env,
    )
    job.wait_line("refused")
    wait_for("a warning", lambda: "store cannot be served" in job.stderr)
    assert job.stderr.count("\n") == 1 and not servers(job)
    job.go()
    assert job.wait() == 0, job.story
    assert job.lines == ["refused", "got value"]
    job.assert_nothing_left()


@pytest.mark.all
def test_with_torch_preloaded_the_store_is_forked_and_one_that_was_killed_is_replaced(launch: Launcher) -> None:
    env = in_each_store(launch.folder / "site", "os._exit(3)")  # interpreters that are started for stores exit
    source = CLIENT + (
        'connect().set("key", "value")\nimport torch\nsay("got", torch.initial_seed())\n'
        'wait_for(f"go{restart}")\nsys.exit(1 - restart)\n'
    )
    job = launch(source, "--preload", "torch", "--max-restarts", "1", env=env)
    job.wait_line("got")
    (first,) = servers(job)
    os.kill(first, signal.SIGKILL)
    wait_for("another store's process", lambda: servers(job) not in ([], [first]))
    (job.folder / "go0").touch()
    job.wait_line("got", 2)
    (job.folder / "go1").touch()
    assert job.wait() == 0, job.story
    assert "cannot be served" not in job.stderr, job.story
    assert len({*job.lines}) == 2, "each worker has its own seed"
    job.assert_nothing_left()


# Like a last checkpoint: the ranks agree through the store, then each saves once; the agent passes the signal on.
SAVE_TOGETHER = """
store = connect()


def save(signum, _):
    signal.signal(signum, signal.SIG_IGN)
    store.add("asked", 1)
    while store.add("asked", 0) < 2:
        time.sleep(0.01)
    say("saved")
    os._exit(0)


signal.signal(signal.{signum}, save)
say("ready")
rest()
"""


@pytest.mark.parametrize(
    "signum, options",
    [
        (signal.SIGTERM, ()),
        pytest.param(
            signal.SIGUSR1, ("--signals-to-handle", "SIGTERM,SIGUSR1", "--preload", "torch"), marks=pytest.mark.all
        ),
    ],
)
def test_a_signal_to_every_process_of_the_job_leaves_the_store_and_the_guard_running(
    launch: Launcher, signum: signal.Signals, options: Sequence[str]
) -> None:
    job = launch(CLIENT + SAVE_TOGETHER.replace("{signum}", signum.name), "--nproc-per-node", "2", *options)
    job.wait_line("ready", 2)
    helpers = {job.child(SERVER), job.child("guards-the-workers-of")}
    everything = job.left()
    # The workers last, so that the helpers are already gone, if possible, when the workers need them.
    for pid in helpers:
        os.kill(pid, signum)
    for pid in (pid for pid in everything if pid not in helpers):
        with contextlib.suppress(ProcessLookupError):  # a worker may have saved already: the agent passes the signal on
            os.kill(pid, signum)
    assert job.wait() == -signum, job.story
    assert job.lines.count("saved") == 2, job.story
    assert "died" not in job.stderr, job.story
    job.assert_nothing_left()


TRAIN = """
import os, sys
import torch
import torch.distributed as dist

restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0 + restart])
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
sys.exit(0 if restart == 1 and total.item() == 5.0 else 1)
"""


def run_delay_s() -> float:
    """How long this thread was ready to run while others ran (`/proc/thread-self/schedstat`)."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


@pytest.mark.all
@pytest.mark.ci
def test_two_ranks_train_over_a_restart_and_the_loop_never_stalls(tmp_path: Path, warm: Warm) -> None:
    """The store starts cold: its imports take seconds."""
    (tmp_path / "train.py").write_text(TRAIN)
    spec = WorkerSpec(
        entrypoint=warm.python,
        args=(str(tmp_path / "train.py"),),
        local_world_size=2,
        max_restarts=1,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    busiest = longest = 0.0

    async def tick() -> None:
        nonlocal busiest, longest
        worked, was = time.thread_time(), time.monotonic() - run_delay_s()
        while True:
            await asyncio.sleep(0.005)
            works, now = time.thread_time(), time.monotonic() - run_delay_s()
            busiest, longest = max(busiest, works - worked), max(longest, now - was)
            worked, was = works, now

    async def main() -> RunResult:
        async with asyncio.timeout(LAUNCH_TIMEOUT_S), asyncio.TaskGroup() as tasks:
            ticking = tasks.create_task(tick())
            result = await Supervisor(spec).run()
            ticking.cancel()
        return result

    gc.collect()
    gc.freeze()  # otherwise a full collection covers everything that earlier tests created
    result = run("uvloop", main())
    gc.unfreeze()
    assert result.state is WorkerState.SUCCEEDED, result
    # Only our own work between two ticks counts, not the time that others keep the CPU busy.
    assert busiest < 0.1
    assert longest < 1.0


def test_the_port_requested_is_the_one_served_and_a_taken_one_is_refused(launch: Launcher) -> None:
    port = str(quiet_port())  # which the kernel assigns to nothing else between the first job and the third
    first = launch("say('port', os.environ['MASTER_PORT'])\nwait_for('go')\n", "--master-port", port, name="a")
    (line,) = first.wait_line("port")
    assert line == f"port {port}"
    second = launch("say('started')", "--master-port", port, name="b")
    assert second.wait() == 2, second.story
    assert re.search(rf"port {port} .*in use", second.stderr) and not second.lines
    second.assert_nothing_left()
    first.go()
    assert first.wait() == 0
    third = launch("say('port', os.environ['MASTER_PORT'])", "--master-port", port, name="c")
    assert third.wait() == 0, third.story
    assert third.lines == [line]


def test_where_a_worker_serves_the_store_no_other_process_gets_its_port(launch: Launcher) -> None:
    job = launch(
        """
        import errno, socket

        port = int(os.environ["MASTER_PORT"])
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as other:
            try:
                other.bind(("", port))
            except OSError as error:
                say("another", errno.errorcode[error.errno])
        with socket.create_server(("", port)):
            say("served")
        raise SystemExit(restart == 0)
        """,
        "--max-restarts=1",
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
    )
    assert job.wait() == 0, job.story
    assert job.lines == ["another EADDRINUSE", "served"] * 2
    job.assert_nothing_left()
