"""Limits of recovery in place: each case ends as documented, and as the undisturbed training, bit by bit."""

from __future__ import annotations

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.ports import quiet_port
from kit.workers.in_place_training import FAULT_AT, course, script, shared_in, start

from aelastic.errors import EXIT_FAILURE

pytestmark = [pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S), pytest.mark.ci, pytest.mark.all]

# The agent's grace, instead of 5 s.
SHORT_GRACE = """
from aelastic.agent.group import worker_group

worker_group.GRACE_S = 1.0
"""

# Reasons why rank 2 does not reach its safe point.
STUCK = {
    "in Python": "time.sleep(100)",
    "in C": "ctypes.CDLL(None).usleep(100_000_000)",
    "in C with the GIL held": "ctypes.PyDLL(None).usleep(100_000_000)",
}


@pytest.mark.parametrize("where", STUCK)
def test_a_survivor_that_does_not_come_is_killed_after_the_grace_and_replaced(
    launch: Launcher, undisturbed: str, where: str
) -> None:
    case = f"""
def on_batch(step):
    if is_fault(step, 2):
        {STUCK[where]}
    if is_fault(step, 1):
        time.sleep(0.3)  # rank 2 is there
        die()
"""
    job = start(launch, script(case), wrapper=SHORT_GRACE)
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 3}, FAULT_AT), job.story
    assert found.end == undisturbed, job.story


def test_a_script_that_catches_everything_around_its_loop_is_killed_after_the_grace(
    launch: Launcher, undisturbed: str
) -> None:
    case = """
def guarded(function):
    def call(round):
        while True:
            try:
                return function(round)
            except BaseException:
                if restarts() or os.environ["RANK"] != "2":
                    raise

    return call
"""
    job = start(launch, script(case), wrapper=SHORT_GRACE)
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 3}, FAULT_AT), job.story
    assert found.end == undisturbed, job.story


def test_a_script_that_catches_everything_and_returns_keeps_its_process(launch: Launcher, undisturbed: str) -> None:
    case = """
def guarded(function):
    def call(round):
        try:
            return function(round)
        except BaseException:
            pass

    return call
"""
    job = start(launch, script(case))
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, FAULT_AT), job.story
    assert found.end == undisturbed, job.story


def test_a_survivor_that_is_out_of_memory_is_replaced(launch: Launcher, undisturbed: str) -> None:
    """Its error follows from a collective's error, but its process can no longer use its device."""
    case = """
honest = gradients


def gradients(ddp, x, step):
    try:
        return honest(ddp, x, step)
    except RuntimeError as error:
        if dist.get_rank() == 2:
            raise torch.OutOfMemoryError("no memory left on the device") from error
        raise
"""
    job = start(launch, script(case))
    found = course(job)
    last = found.restarts
    assert (found.kept(0, last), found.step(last)) == ({0, 3}, FAULT_AT), job.story
    assert found.end == undisturbed, job.story


def test_only_what_is_shared_is_kept_by_a_replacement(launch: Launcher) -> None:
    """A value in a global is lost with its process; a shared value is not."""
    case = """
seen, count = Value(0), 0
state += [seen]


def after_update(round, step):
    global count
    seen.value += 1
    count += 1


def on_end(round):
    say("counted", dist.get_rank(), seen.value, count)
"""
    job = start(launch, script(case), ranks=2)
    found = course(job)
    assert found.kept(0, 1) == {0}, job.story
    assert sorted(line for line in job.lines if line.startswith("counted")) == ["counted 0 40 40", "counted 1 40 20"]


HOLD_S = 4
# Time within which they learn of a loss, in addition to its hold and to a lease.
NOTIFIED_AT_ONCE = """
from aelastic.agent import generation

generation.HEARS_WITHIN_S = 0.0
"""


def test_a_failure_that_is_held_leaves_the_workers_of_other_nodes_their_processes(
    launch: Launcher, undisturbed: str
) -> None:
    case = """
import socket

from aelastic.training import consequence

consequence._SOON_S = 0.5


def cut():
    # As where the agent has no copies of a worker's connections, and they end with it.
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as each:
                if each.family == socket.AF_INET:
                    each.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # no socket, or no connection


def on_batch(step):
    if is_fault(step, 1):
        cut()
        die()
"""
    meeting = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{quiet_port()}",
        "--nnodes=2",
        "--rdzv-conf=lease=2",
        f"--on-failure=hold:{HOLD_S}",
    ]
    jobs = [
        start(launch, script(case), *meeting, f"--node-rank={rank}", ranks=2, name=f"n{rank}", wrapper=NOTIFIED_AT_ONCE)
        for rank in range(2)
    ]
    found = course(jobs[0])
    jobs[1].assert_ends(limit_s=LAUNCH_TIMEOUT_S)
    assert (found.kept(0, 1), found.step(1), found.restarts) == ({0}, FAULT_AT, 1), jobs[0].story
    assert found.end == undisturbed, jobs[0].story
    others = shared_in(jobs[1].lines)
    assert {each.rank for each in others} == {2, 3} and len({each.pid for each in others}) == 2, jobs[1].story


def test_a_number_of_ranks_that_the_script_cannot_use_is_its_failure(launch: Launcher, undisturbed: str) -> None:
    """A node is lost, and the script raises in the smaller round; once another node has joined, the job succeeds."""
    case = """
forming = form


def form(round):
    forming(round)
    if dist.get_world_size() != 4:
        say("refuses", dist.get_world_size())
        raise ValueError("this mesh needs 4 ranks")


def on_batch(step):
    if is_fault(step, 0, 1, 2, 3):
        say("there")
        wait_for("go")
"""
    endpoint = f"127.0.0.1:{quiet_port()}"
    meeting = [
        "--nnodes=1:2",
        "--rdzv-backend=c10d",
        "--rdzv-id=job",
        f"--rdzv-endpoint={endpoint}",
        "--rdzv-conf=last_call_timeout=1",
    ]
    jobs = [start(launch, script(case), *meeting, ranks=2, name=name) for name in ("n0", "n1")]
    for job in jobs:
        job.wait_line("there", 2, LAUNCH_TIMEOUT_S)
    jobs[1].process.kill()
    jobs[0].go()
    jobs[0].wait_line("refuses", limit_s=LAUNCH_TIMEOUT_S)
    start(launch, script(case), *meeting, ranks=2, name="n2")
    jobs[0].assert_ends(limit_s=LAUNCH_TIMEOUT_S)
    assert "recovering in place" in jobs[0].stderr and "ValueError: this mesh needs 4 ranks" in jobs[0].stderr
    ends = [line for job in launch.jobs for line in job.lines if line.startswith("end ")]
    assert ends == [f"end {undisturbed}"]


# Sharded models.  Each part of the state is in one rank, or in two with replicas.

SHARDED = """
import glob

import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aelastic import in_place

STEPS = 12
torch.set_num_threads(1)


def path(step):
    return f"step{step}-rank{os.environ['RANK']}"


@in_place
def train(round):
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", SHAPE, mesh_dim_names=("replicate", "shard")[-len(SHAPE):])
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def load():
        if not os.path.exists(path(4)):
            return None
        saved = torch.load(path(4), weights_only=False)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        return 4

    replicas = mesh["replicate"].get_group() if len(SHAPE) == 2 else dist.new_subgroups(1)[0]
    start = round.share(model, optimizer, load=load if HAS_CHECKPOINT else None, replicas=replicas)
    say("shared", restart_count(), rank, os.getpid(), start)
    for step in round.steps(start, STEPS):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x = torch.randn(16, 32, generator=generator)
        loss = nn.functional.mse_loss(model(x), x[:, :1])
        if restart_count() < DEATHS and step == 6 and rank in LOST:
            die_together()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if HAS_CHECKPOINT and step == 3 and restart_count() == 0:
            torch.save([model.state_dict(), optimizer.state_dict()], path(4))
            dist.barrier()
    weights = sum(each.full_tensor().double().sum() for each in model.parameters()).item()
    if rank == 0:
        say("end", f"loss {loss.item():.15f} weights {weights:.15f}")
    del model, optimizer
    dist.destroy_process_group()


def die_together():
    # At one moment: a rank that waits for the others in a collective would be interrupted, and live.
    at = "dies{}-rank{}-pid{}"
    open(at.format(restart_count(), os.environ["RANK"], os.getpid()), "w").close()
    while len(there := glob.glob(at.format(restart_count(), "*", "*"))) < len(LOST):
        time.sleep(0.01)
    if int(os.environ["RANK"]) == LOST[0]:
        pids = {int(name.rpartition("pid")[2]) for name in there}
        for pid in [*(pids - {os.getpid()}), os.getpid()]:
            os.kill(pid, signal.SIGKILL)
    time.sleep(100)


def restart_count():
    return int(os.environ["TORCHELASTIC_RESTART_COUNT"])


train()
"""


def sharded(shape: tuple[int, ...], lost: tuple[int, ...], *, has_checkpoint: bool = False, deaths: int = 1) -> str:
    return f"SHAPE, LOST, DEATHS, HAS_CHECKPOINT = {shape}, {lost}, {deaths}, {has_checkpoint}\n{SHARDED}"


@pytest.mark.parametrize("shape, lost, has_checkpoint, kept, step", [
    ((2, 2), (1,), False, {0, 2, 3}, 6),
    ((2, 2), (1, 3), True, {0, 2}, 4),
    ((2, 2), (1, 3), False, set(), 0),
    ((2,), (1,), True, {0}, 4),
    ((2,), (1,), False, set(), 0),
], ids=["one replica", "both, checkpoint", "both", "no replicas, checkpoint", "no replicas"])  # fmt: skip
def test_a_shard_is_kept_while_one_of_its_replicas_lives(
    launch: Launcher, shape: tuple[int, ...], lost: tuple[int, ...], *, has_checkpoint: bool, kept: set[int], step: int
) -> None:
    ranks = 4 if len(shape) == 2 else 2
    undisturbed = course(start(launch, sharded(shape, ()), ranks=ranks, name="undisturbed"))
    job = start(launch, sharded(shape, lost, has_checkpoint=has_checkpoint), ranks=ranks)
    found = course(job)
    last = found.restarts
    assert (found.kept(0, last), found.step(last)) == (kept, step), job.story
    assert found.end == undisturbed.end, job.story


def test_a_shard_is_kept_in_the_first_step_of_a_round(launch: Launcher) -> None:
    """In the middle of a step, modules have unsharded parameters: these don't count as changed."""
    job = start(launch, sharded((2, 2), (1,), deaths=2))
    found = course(job)
    assert (found.restarts, found.kept(0, 2), found.step(2)) == (2, {0, 2, 3}, 6), job.story


def test_ranks_with_different_states_end_the_job(launch: Launcher) -> None:
    """A restart would resume from a checkpoint, or start over, and nobody would notice that the training is wrong."""
    case = """
def after_update(round, step):
    if restarts() == 0 and step == 16 and dist.get_rank() == 2:
        with torch.no_grad():
            model[0].weight[0, 0] += 1.0
"""
    job = start(launch, script(case))
    job.assert_ends(EXIT_FAILURE, LAUNCH_TIMEOUT_S)
    assert "share: ranks [0, 1, 2, 3] should have equal states" in job.stderr, job.story
    assert "a restart would hide that ranks which should have the same state differ" in job.stderr, job.story
    assert not [line for line in job.lines if line.startswith("end ")], job.story
