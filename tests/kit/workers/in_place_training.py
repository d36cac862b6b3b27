"""A training script that recovers in place.  Its state has each part that a lost step may leave half done.

Each place where it may fail is a function: a test replaces some of them with its own code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher

STEPS = 40
FAULT_AT = 20  # the step of the first round in which the fault comes
RANKS = 4

_FUNCTIONS = """
import ctypes, random, threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from aelastic import in_place
from aelastic.training import Value

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
second = torch.optim.SGD(model[4].parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=5)
state = [model, optimizer, second, scheduler, scaler]


def restarts():
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def is_fault(step, *ranks, at=FAULT_AT):
    # Whether one of these ranks is at the step of the fault, in the first round.
    return restarts() == 0 and step == at and int(os.environ["RANK"]) in ranks


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def die_after(seconds):
    threading.Timer(seconds, die).start()


def form(round):
    dist.init_process_group("gloo")


def load():
    return None


def share(round):
    return round.share(*state, load=load)


def wrap():
    # With this option, buckets keep their order, so that gradients are added in the same order in each round.
    return DistributedDataParallel(model, find_unused_parameters=True)


def data_of(step):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank()))


def batches(start):
    return map(data_of, range(start, STEPS))


def steps(round, start):
    return round.steps(start, STEPS)


def on_batch(step):
    # Before the forward pass.
    if is_fault(step, 1):
        die()


def on_loss(step):
    # Between the forward and the backward pass.
    pass


def gradients(ddp, x, step):
    loss = nn.functional.mse_loss(ddp(x), x[:, :1] * x[:, 1:2])
    on_loss(step)
    optimizer.zero_grad()
    second.zero_grad()
    scaler.scale(loss).backward()
    return loss.detach()


def overflow():
    for parameter in model.parameters():
        parameter.grad.fill_(float("inf"))


def update(step):
    scaler.step(optimizer)
    scaler.step(second)
    scaler.update()
    scheduler.step()


def after_update(round, step):
    pass


def result(loss):
    # What rank 0 tells in the end.
    weights = sum(each.double().sum() for each in model.state_dict().values()).item()
    rate, scale = optimizer.param_groups[0]["lr"], scaler.get_scale()
    return f"loss {loss.item():.15f} weights {weights:.15f} lr {rate:.15f} scale {scale}"


def on_end(round):
    # After the last step.
    pass


def guarded(function):
    # What the decorator gets.
    return function


"""

_TRAINING = """


def train(round):
    form(round)
    start = share(round)
    rank = dist.get_rank()
    say("shared", restarts(), rank, os.getpid(), start)
    ddp = wrap()
    loss = torch.tensor(float("nan"))
    data = iter(batches(start))
    for step in steps(round, start):
        x = next(data)
        torch.manual_seed(step * dist.get_world_size() + rank)  # dropout
        if restarts() == 0 and step in {16, FAULT_AT}:
            dist.barrier()  # a rank that dies from here on finds no other one in the step before
        on_batch(step)
        loss = gradients(ddp, x, step)
        if step % 11 == 5:
            overflow()  # the scaler skips the step of both optimizers
        update(step)
        after_update(round, step)
    if rank == 0 and start < STEPS:
        say("end", result(loss))
    on_end(round)
    # Before the group: without recovery in place, the destructor of DDP hangs now and then where it holds the last one.
    del ddp
    dist.destroy_process_group()


in_place(guarded(train))()
"""


@dataclass(frozen=True)
class Shared:
    """A rank that has the state in a round."""

    restarts: int
    rank: int
    pid: int
    step: int


@dataclass(frozen=True)
class Course:
    """The output of a job's workers."""

    shared: list[Shared]
    end: str  # loss and weights

    @property
    def restarts(self) -> int:
        return max(each.restarts for each in self.shared)

    def pids(self, restarts: int) -> dict[int, int]:
        """The processes by rank, in the round after this many restarts."""
        return {each.rank: each.pid for each in self.shared if each.restarts == restarts}

    def kept(self, before: int, after: int) -> set[int]:
        """The ranks whose processes are the same in both rounds."""
        return {rank for rank, _ in self.pids(before).items() & self.pids(after).items()}

    def step(self, restarts: int) -> int:
        """The step at which all ranks of a round begin."""
        steps = {each.step for each in self.shared if each.restarts == restarts}
        assert len(steps) == 1, self.shared
        return steps.pop()


def script(case: str = "", steps: int = STEPS) -> str:
    """The training script, with the case's functions replaced."""
    numbers = f"STEPS, FAULT_AT = {steps}, {FAULT_AT}\n"
    return numbers + _FUNCTIONS + case + _TRAINING


def start(launch: Launcher, code: str, *options: str, ranks: int = RANKS, **more: Any) -> Job:
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(launch.folder / "inductor")}  # by default left in the temporary folder
    env = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **caches, **launch.warm.env, **more.pop("env", {})}
    return launch(code, f"--nproc-per-node={ranks}", "--max-restarts=20", *options, env=env, **more)


def course(job: Job, limit_s: float = LAUNCH_TIMEOUT_S) -> Course:
    """Waits until the job has succeeded; returns its output."""
    job.assert_ends(limit_s=limit_s)
    assert not [path for path in job.folder.rglob("*") if path.is_socket()]
    shared = shared_in(job.lines)
    ends = {line.removeprefix("end ") for line in job.lines if line.startswith("end ")}
    assert len(ends) == 1, job.story
    return Course(shared, ends.pop())


def shared_in(lines: list[str]) -> list[Shared]:
    return [Shared(*map(int, line.split()[1:])) for line in lines if line.startswith("shared ")]
