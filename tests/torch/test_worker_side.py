"""torch features in aelastic's workers: they report the same as torchrun's workers."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import textwrap
from contextlib import suppress
from typing import Any

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher
from kit.ports import quiet_port
from kit.workers.torch_versions import TORCH
from kit.workers.torch_workers import AELASTIC, TORCHRUN, both, ours, start

# Each test imports torch in several processes, under two launchers.
pytestmark = pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S)


def by_rank(*words: str, restart: int = 0) -> list[str]:
    """The expected lines of two workers that report the same."""
    return sorted(f"{restart} {rank} {each}" for rank in (0, 1) for each in words)


# Process groups.

# Several groups, after the first one, for each other way to meet.
MEETINGS = """
where = f"tcp://127.0.0.1:{os.environ['FREE_PORT_' + os.path.basename(os.getcwd())]}"
job = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
file = os.path.abspath("store")
store, its_rank, its_world_size = next(iter(dist.rendezvous("env://")))
store.set(f"from {rank}", str(rank))
assert store.get(f"from {1 - rank}") == str(1 - rank).encode()
assert (its_rank, its_world_size) == (rank, world_size)
meetings = {
    # A prefix: where one store is shared, torch reads the last group's addresses else, sometimes.
    "what rendezvous gives": lambda: {"store": dist.PrefixStore("given", store)},
    "a client of the job's store": lambda: {"store": dist.PrefixStore("mine", dist.TCPStore(*job, is_master=False))},
    "a file store": lambda: {"store": dist.FileStore(file + "1", world_size)},
    "a file": lambda: {"init_method": f"file://{file}2"},
    # As torch's own code does that wants a store of its own.
    "a port of its own": lambda: os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False") or {"init_method": where},
}
for name, options in meetings.items():
    dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=SOON, **options())
    tell(name, total())
    dist.barrier()
    dist.destroy_process_group()
"""


def test_workers_get_their_ranks_and_make_groups_of_all_kinds_wherever_they_meet(
    launch: Launcher, free_ports: dict[str, str]
) -> None:
    reported = both(
        launch,
        """
        tell("launched", dist.is_torchelastic_launched())
        tell("local", dist.get_node_local_rank(), dist.get_node_local_rank(fallback_rank=9))
        tell("before", dist.is_initialized(), dist.get_rank.__name__)
        dist.init_process_group("gloo", timeout=SOON)
        tell("after", dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend(), total())
        try:
            dist.init_process_group("gloo")
        except ValueError as error:
            tell("twice", error)
        everyone = dist.new_group([0, 1], backend="gloo")
        alone = [dist.new_group([each], backend="gloo") for each in (0, 1)][rank]
        subgroup, _ = dist.new_subgroups(1)
        tell("groups", total(everyone), total(alone), total(subgroup))
        dist.monitored_barrier(timeout=SOON)
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": rank})
        tell("objects", objects)
        box = [("from", rank)]
        dist.broadcast_object_list(box, src=1)
        tell("box", box)
        mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
        tell("mesh", mesh["data"].get_local_rank(), mesh["model"].get_local_rank())
        if rank == 0:
            dist.send(torch.tensor([7.0]), dst=1)
        else:
            received = torch.zeros(1)
            dist.recv(received, src=0)
            tell("received", received.item())
        dist.barrier()  # or the first that ends breaks the connections that the other is about to make
        dist.destroy_process_group()
        """
        + textwrap.indent(MEETINGS, " " * 8),
        **free_ports,
    )
    assert {"0 1 groups 3.0 2.0 2.0", "0 1 received 7.0", "0 0 box [('from', 1)]", "0 1 launched True"} <= set(reported)
    assert {"0 1 local 1 1", "0 0 before False get_rank", "0 1 after True 1 2 gloo 3.0"} <= set(reported)
    places = ("what rendezvous gives", "a client of the job's store", "a file store", "a file", "a port of its own")
    assert set(by_rank(*(f"{place} 3.0" for place in places))) <= set(reported)


@pytest.mark.all  # the same store as for `env://`
def test_a_process_group_comes_up_at_the_jobs_own_address_and_port(launch: Launcher) -> None:
    reported = both(
        launch,
        """
        where = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size)
        tell("sum", total())
        dist.barrier()
        dist.destroy_process_group()
        """,
    )
    assert reported == by_rank("sum 3.0")


@pytest.fixture
def free_ports() -> dict[str, str]:
    """One port for each launcher's workers."""
    return {f"FREE_PORT_{launcher}": str(quiet_port()) for launcher in (TORCHRUN, AELASTIC)}


@pytest.mark.all
def test_a_tcp_address_of_ones_own_works_where_the_shared_store_is_turned_off(
    launch: Launcher, free_ports: dict[str, str]
) -> None:
    reported = both(
        launch,
        """
        tell("shared", os.environ["TORCHELASTIC_USE_AGENT_STORE"])
        where = f"tcp://127.0.0.1:{os.environ['FREE_PORT_' + os.path.basename(os.getcwd())]}"
        for method in (where, "env://"):
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=world_size)
            tell(method[:3], total())
            dist.destroy_process_group()
        if restart == 0:
            open(f"told{rank}", "w").close()
            wait_for(f"told{1 - rank}")  # or the failure would end it before
            if rank == 0:
                os._exit(3)
            time.sleep(600)
        """,
        "--max-restarts=1",
        "--standalone",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
        **free_ports,
    )
    words = ("shared False", "tcp 3.0", "env 3.0")
    assert reported == by_rank(*words) + by_rank(*words, restart=1)


@pytest.mark.all
def test_a_tcp_address_of_ones_own_where_the_store_is_shared_is_what_this_torch_makes_of_it(
    launch: Launcher, free_ports: dict[str, str]
) -> None:
    # Up to torch 2.13 all workers are clients in that case, whatever the address, and time out; later it compares them.
    is_served = TORCH >= (2, 14)
    reported = both(
        launch,
        f"""
        where = f"tcp://127.0.0.1:{{os.environ['FREE_PORT_' + os.path.basename(os.getcwd())]}}"
        try:
            timeout = timedelta(seconds={60 if is_served else 2})
            dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world_size, timeout=timeout)
            tell("sum", total())
            dist.barrier()
        except dist.DistNetworkError:
            tell("no agent serves it")
        """,
        **free_ports,
    )
    assert reported == by_rank("sum 3.0" if is_served else "no agent serves it")


@pytest.mark.all
def test_ranks_make_a_group_and_save_after_a_signal_to_every_process_of_the_job(launch: Launcher) -> None:
    """As when a scheduler ends a job: agent, workers and helpers get SIGTERM at the same time."""
    job = start(
        launch,
        AELASTIC,
        """
        dist.init_process_group("gloo")
        is_asked = False

        def ask(*_):
            global is_asked
            is_asked = True

        signal.signal(signal.SIGTERM, ask)
        say("ready")
        while True:
            time.sleep(0.05)
            asked = torch.tensor([float(is_asked)])
            dist.all_reduce(asked)
            if asked.item():
                break
        dist.barrier(dist.new_group(timeout=SOON))
        say("saved")
        """,
    )
    job.wait_line("ready", 2, LAUNCH_TIMEOUT_S)
    for pid in job.left():
        with suppress(ProcessLookupError):  # it ended with the previous one
            os.kill(pid, signal.SIGTERM)
    job.wait(LAUNCH_TIMEOUT_S)
    assert job.lines.count("saved") == 2, job.story


# RPC.


@pytest.mark.all
def test_rpc_calls_its_peers_beside_a_process_group(launch: Launcher) -> None:
    reported = both(
        launch,
        """
        import torch.distributed.rpc as rpc


        def add(a, b):
            return a + b


        dist.init_process_group("gloo")
        options = rpc.TensorPipeRpcBackendOptions(init_method="env://", rpc_timeout=60)
        rpc.init_rpc(f"worker{rank}", rank=rank, world_size=world_size, rpc_backend_options=options)
        peer = f"worker{1 - rank}"
        tell("sync", rpc.rpc_sync(peer, add, args=(torch.ones(2), rank)).tolist())
        tell("async", rpc.rpc_async(peer, add, args=(1, 2)).wait())
        tell("remote", rpc.remote(peer, add, args=(3, rank)).to_here())
        tell("name", rpc.get_worker_info().name, rpc.get_worker_info(peer).id)
        rpc.shutdown()
        tell("sum", total())
        dist.destroy_process_group()
        """,
    )
    assert {"0 0 sync [1.0, 1.0]", "0 1 remote 4", "0 1 name worker1 0"} <= set(reported)


# Training.

TRAINING = """
import torch.distributed.checkpoint as dcp
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def make():
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(4, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def learn(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


def state_of(model, optimizer):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def digest(model):
    return " ".join(f"{number:.6f}" for weights in model.parameters() for number in weights.flatten().tolist())


"""


@pytest.mark.parametrize("how", ["sync", pytest.param("async in a process", marks=pytest.mark.all)])
def test_ddp_trains_and_continues_from_a_distributed_checkpoint_after_a_crash(launch: Launcher, how: str) -> None:
    script = TRAINING + textwrap.dedent(
        """
            from torch.distributed.checkpoint.state_dict import set_state_dict
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType


            def save(state):
                if os.environ["HOW"] == "sync":
                    dcp.save(state, checkpoint_id="saved")
                else:
                    kind = AsyncCheckpointerType.PROCESS
                    dcp.async_save(state, checkpoint_id="saved", async_checkpointer_type=kind).result()


            def main():
                dist.init_process_group("cpu:gloo")
                model, optimizer = make()
                first = 0
                if restart == 1:
                    state = {**state_of(model, optimizer), "step": 0}
                    dcp.load(state, checkpoint_id="saved")
                    set_state_dict(
                        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
                    )
                    first = state["step"]
                    tell("loaded", first, digest(model))
                data = TensorDataset(torch.arange(96.0).reshape(24, 4) / 96)
                loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, shuffle=False), num_workers=2)
                for step, (batch,) in enumerate(loader):
                    if step < first:
                        continue
                    learn(model, optimizer, batch)
                    tell("step", step, digest(model))
                    if step == 1:
                        save({**state_of(model, optimizer), "step": 2})
                        dist.barrier()
                        if rank == 0:
                            os.kill(os.getpid(), signal.SIGKILL)
                        time.sleep(600)
                dist.destroy_process_group()


            if __name__ == "__main__":
                main()
            """
    )
    reported = ours(launch, script, "--max-restarts=1", HOW=how)
    weights = {line.split(" ", 2)[2] for line in reported if line.split()[2:4] == ["step", "1"]}
    loaded = {line.split(" ", 2)[2] for line in reported if line.split()[2] == "loaded"}
    assert {words.removeprefix("step 1 ") for words in weights} == {words.removeprefix("loaded 2 ") for words in loaded}
    assert [line.split()[:4] for line in reported if line.split()[2:4] == ["step", "2"]] == [
        ["1", "0", "step", "2"],
        ["1", "1", "step", "2"],
    ]


# torchelastic's own features for workers.


def written_errors(job: Job) -> dict[str, Any]:
    """By restart and local rank, the errors that `record` wrote, without what differs between runs."""
    found = {}
    for path in (job.folder / "logs").rglob("error.json"):
        message = json.loads(path.read_text())["message"]
        assert re.fullmatch(r"\d{10}", str(message["extraInfo"].pop("timestamp")))
        message["extraInfo"]["py_callstack"] = re.sub(r'"/.*/', '"', message["extraInfo"]["py_callstack"])
        found["/".join(path.parts[-3:-1])] = message
    return found


@pytest.mark.all  # six imports of torch
def test_record_writes_the_same_where_the_same_is_looked_for(launch: Launcher) -> None:
    script = """
        from torch.distributed.elastic.multiprocessing.errors import record


        def step():
            raise ValueError("batch is empty")


        @record
        def main():
            if rank == 1:
                wait_for(f"up{restart}")
                step()
            open(f"up{restart}", "w").close()
            time.sleep(600)


        main()
        """
    jobs = [
        start(launch, each, script, "--max-restarts=1", "--log-dir=logs", "--redirects=3")
        for each in (TORCHRUN, AELASTIC)
    ]
    assert [job.wait(LAUNCH_TIMEOUT_S) for job in jobs] == [1, 1], [job.story for job in jobs]
    theirs, our_errors = (written_errors(job) for job in jobs)
    assert set(our_errors) == {"attempt_0/1", "attempt_1/1"}
    assert our_errors == theirs
    for job in jobs:
        assert "ValueError: batch is empty" in job.stderr
    jobs[1].assert_nothing_left()


@pytest.mark.all  # two more imports of torch for each worker
def test_timers_expire_as_ever(launch: Launcher) -> None:
    reported = both(
        launch,
        """
        import torch.distributed.elastic.timer as timer
        import torch.multiprocessing as mp


        def overstay(queue):
            timer.configure(timer.LocalTimerClient(queue))
            with timer.expires(after=60):
                pass
            with timer.expires(after=0.01):
                time.sleep(600)


        if __name__ == "__main__":
            try:
                with timer.expires(after=1):
                    tell("never")
            except RuntimeError as error:
                tell("unconfigured", error)
            context = mp.get_context("spawn")
            queue = context.Queue()
            server = timer.LocalTimerServer(queue, max_interval=0.05)
            server.start()
            child = context.Process(target=overstay, args=(queue,))
            child.start()
            child.join()
            tell("reaped by", signal.Signals(-child.exitcode).name)
            server.stop()
        """,
        python=sys.executable,
    )
    assert reported == by_rank(
        "reaped by SIGKILL", "unconfigured Configure timer client before using countdown timers."
    )


# The control plane: a client of a worker's socket learns what the worker is doing.

SERVED = """
from torch.distributed.elastic.control_plane import worker_main


def in_the_middle_of_training():
    say("ready", restart, rank, os.environ["TORCH_WORKER_SERVER_SOCKET"])
    wait_for(f"go{restart}")


@worker_main()
def main():
    in_the_middle_of_training()
    if restart == 0 and rank == 1:
        os._exit(3)


main()
"""


def ask(path: str, handler: str) -> tuple[str, str]:
    """Status line and body of the response to one HTTP request."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(LAUNCH_TIMEOUT_S)
        client.connect(path)
        client.sendall(f"POST /handler/{handler} HTTP/1.0\r\nContent-Length: 0\r\n\r\n".encode())
        answer = b""
        while chunk := client.recv(1 << 16):
            answer += chunk
    head, _, body = answer.decode().partition("\r\n\r\n")
    return head.splitlines()[0], body


def test_each_worker_of_each_attempt_can_be_asked_what_it_does_though_the_temporary_folders_name_is_long(
    launch: Launcher,
) -> None:
    deep = launch.folder / ("ü" * 100)
    deep.mkdir()
    job = start(launch, AELASTIC, SERVED, "--max-restarts=1", TMPDIR=str(deep))
    paths = []
    for restart in (0, 1):
        for line in job.wait_line(f"ready {restart} ", 2, LAUNCH_TIMEOUT_S):
            path = line.split(" ", 3)[3]
            assert ask(path, "ping") == ("HTTP/1.1 200 OK", "pong")
            status, stacks = ask(path, "dump_traceback")
            assert status == "HTTP/1.1 200 OK" and "in in_the_middle_of_training" in stacks
            paths.append(path)
        (job.folder / f"go{restart}").touch()
    job.assert_ends(limit_s=LAUNCH_TIMEOUT_S)
    assert len(set(paths)) == 4 and not [path for path in paths if os.path.exists(path)]
    assert all(len(os.fsencode(path)) <= 107 for path in paths)
    assert not list(deep.iterdir())
