"""Many rounds leave nothing behind that grows in a process that takes part in all of them.

`TEST_EFFORT=soak` runs 200 rounds of each model; `-s` shows the resources of the oldest process and of its agent.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest
from kit.effort import EFFORT, ROUNDS_IN_PLACE
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.workers.in_place_training import course, script, start

pytestmark = [pytest.mark.timeout(7200 if EFFORT == "soak" else 9 * LAUNCH_TIMEOUT_S), pytest.mark.all]

SETTLED_AFTER = 5  # rounds: by then each cache is full
GROWTH_MIB = 8.0  # per process, in all rounds after these: the allocator's arenas come and go
IN_USE = 3  # tolerance for an agent's descriptors and threads

# In each round a rank other than 0 is lost, two steps after the start.
LOST = """
import gc


def held():
    # Of this process and its agent: descriptors, threads and resident memory.
    for pid in os.getpid(), os.getppid():
        yield len(os.listdir(f"/proc/{pid}/fd"))
        yield len(os.listdir(f"/proc/{pid}/task"))
        yield int(open(f"/proc/{pid}/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def on_batch(step):
    if step == 2 * restarts() + 2 and dist.get_rank() == 0:
        time.sleep(0.1)  # the groups of the last round are dropped by a thread
        say("held", restarts(), *held())
    if step == 2 * restarts() + 2 and restarts() < ROUNDS:
        dist.barrier()
        if dist.get_rank() == 1 + restarts() % 3:
            die()
"""

# The model belongs to a mesh of two replicas and two shards: each round makes a new one.
SHARDED = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def share(round):
    global model, optimizer, second, scheduler, state
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    for layer in model[0], model[3], model:
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    second = torch.optim.SGD(model[3].parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    state = [model, optimizer, second, scheduler, scaler]
    return round.share(*state, replicas=mesh["replicate"].get_group())


def wrap():
    return model


def gradients(ddp, x, step):
    loss = nn.functional.mse_loss(model(x), x[:, :1])
    optimizer.zero_grad()
    second.zero_grad()
    loss.backward()
    return loss.detach()


def overflow(): pass


def update(step):
    optimizer.step()
    second.step()
    scheduler.step()


def result(loss):
    return f"loss {loss.item():.15f}"
"""


@dataclass(frozen=True)
class Held:
    """Resources of one process."""

    descriptors: int
    threads: int
    memory: int  # resident bytes


@pytest.mark.parametrize("case", [pytest.param("", id="DDP"), pytest.param(SHARDED, marks=pytest.mark.ci, id="FSDP2")])
def test_rounds_leave_nothing_in_the_workers_and_their_agent(launch: Launcher, case: str) -> None:
    code = f"ROUNDS = {ROUNDS_IN_PLACE}\n{case}{LOST}"
    options = ["--preload=torch,torch._dynamo,aelastic.training.rounds", "--max-restarts=100000"]
    # The workers' parent must be the agent, not the process that starts the tests' warm interpreters.
    env = {"PYTHON_EXEC": sys.executable, "TORCHINDUCTOR_CACHE_DIR": str(launch.folder / "compiled")}
    job = start(launch, script(code, 2 * ROUNDS_IN_PLACE + 10), *options, env=env)
    found = course(job, limit_s=LAUNCH_TIMEOUT_S * (1 + ROUNDS_IN_PLACE / 10))
    assert (found.restarts, found.kept(0, ROUNDS_IN_PLACE)) == (ROUNDS_IN_PLACE, {0}), job.story
    rows = [[*map(int, line.split()[1:])] for line in job.lines if line.startswith("held ")]
    for name, first_value in ("the oldest worker", 1), ("its agent", 4):
        held = {values[0]: Held(*values[first_value : first_value + 3]) for values in rows}
        for number in sorted({0, 1, 2, SETTLED_AFTER, 10, 20, 50, 100, 150, ROUNDS_IN_PLACE} & held.keys()):
            sys.stdout.write(f"{name}, round {number}: {held[number]}\n")
        first = held[SETTLED_AFTER]
        settled = [held[number] for number in range(SETTLED_AFTER, ROUNDS_IN_PLACE + 1)]
        # An agent is always busy with something: a connection, or a thread that waits a while for more work.
        more = 0 if name == "the oldest worker" else IN_USE
        assert max(each.descriptors for each in settled) <= first.descriptors + more, held
        assert max(each.threads for each in settled) <= first.threads + more, held
        grown_mib = max(each.memory - first.memory for each in settled) / 2**20
        sys.stdout.write(f"{name}: at most {grown_mib:.1f} MiB more than in round {SETTLED_AFTER}\n")
        assert grown_mib <= GROWTH_MIB, held
