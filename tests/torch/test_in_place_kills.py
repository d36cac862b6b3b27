"""Ranks are killed repeatedly at random moments, and training continues as if nothing had happened.

`TEST_EFFORT=soak` kills 1,000 times under one agent, and as often under two, in jobs of 100.  `-s` shows each job's
figures.  A job's number is its seed: `-k two-7` has the victims and pauses of job 7 under two agents in a soak.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import pytest
from kit.effort import EFFORT, KILLED_JOBS, KILLS
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.ports import quiet_port
from kit.waiting import wait_for
from kit.warm.interpreters import Warm
from kit.workers.in_place_training import RANKS, script, start

pytestmark = [pytest.mark.timeout(7200 if EFFORT == "soak" else 9 * LAUNCH_TIMEOUT_S), pytest.mark.all]

FOREVER = 1_000_000  # steps
COMPARED_EVERY = 25  # steps
RECOVERY_LIMIT_S = 90.0  # after 60 s the agent restarts all workers, which loses the state
PAUSE_S = (0.1, 0.6)  # between a recovery and the next kill
AT_ONCE = 0.25  # share of kills without a pause: the previous recovery has just ended
DOUBLED, DOUBLED_WITHIN_S = 0.2, 0.06  # share of kills followed by that of another rank, and how soon

# A repeated or missing step shows in the comparison.  Each rank notes in a file which steps it has committed, and from
# that, its replacement can also tell how many are lost.
NOTED = """
import hashlib


def is_end():
    told = torch.tensor(int(os.path.exists(FOLDER + "/go")))
    dist.all_reduce(told)
    return told.item() > 0


def noted(round, start, tensors):
    rank = dist.get_rank()
    with open(os.open(f"{FOLDER}/committed-{rank}", os.O_RDWR | os.O_CREAT), "r+b", buffering=0) as note:
        lost = int(note.read() or 0) - start
        say("checked", round.number, rank, os.getpid(), start, lost, time.monotonic())
        for step in round.steps(start, STEPS):
            note.seek(0)
            note.write(b"%020d" % step)
            if step % COMPARED_EVERY == 0:
                state = b"".join(each.detach().numpy().tobytes() for each in tensors())
                say("at", step, rank, hashlib.sha256(state).hexdigest()[:16])
                if is_end():
                    return
            yield step
"""

# Learning never stops.  All of the state but the buffers is compared, as each rank has its own statistics.
DDP = """
scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=10)
state = [model, optimizer, second, scheduler, scaler]


def on_batch(step): pass


def form(round):
    dist.init_process_group("gloo")
    counted = torch.tensor([1, 1 << dist.get_rank(), round.number])
    dist.all_reduce(counted)
    assert counted.tolist() == [4, 0b1111, 4 * round.number], counted


def compared():
    tensors = [*model.parameters(), torch.tensor([scaler.get_scale(), *scheduler.get_last_lr()])]
    for each in optimizer, second:
        tensors += [value for values in each.state.values() for value in values.values() if torch.is_tensor(value)]
    return tensors


def steps(round, start): return noted(round, start, compared)
"""

# On a mesh of 2 x 2, ranks 0 and 2 hold one shard, ranks 1 and 3 the other.
HSDP = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from aelastic import in_place

torch.set_num_threads(1)


@in_place
def train(round):
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 1))
    for layer in model[0], model[2]:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7)
    start = round.share(model, optimizer, scheduler, replicas=mesh["replicate"].get_group())

    def compared():
        moments = [values["exp_avg"] for values in optimizer.state.values()]
        shards = [each.to_local() for each in (*model.parameters(), *moments)]
        return [*shards, torch.tensor(scheduler.get_last_lr())]

    for step in noted(round, start, compared):
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        x = torch.randn(16, 32, generator=generator)
        loss = nn.functional.mse_loss(model(x), x.sin().mean(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    del model, optimizer, scheduler
    dist.destroy_process_group()


train()
"""


@dataclass(frozen=True)
class Training:
    """A training to disturb.

    Attributes:
        modules: those that each replacement has when it is forked.
        shards: each replica group has one of each.
    """

    modules: str
    shards: int

    def script(self, folder: str, steps: int) -> str:
        names = f"FOLDER, COMPARED_EVERY, STEPS = {folder!r}, {COMPARED_EVERY}, {steps}\n"
        return names + (NOTED + HSDP if self.shards > 1 else script(NOTED + DDP, steps))

    def victims(self, chance: random.Random) -> list[int]:
        """One rank, or two, such that one rank of each shard stays alive."""
        first, second = chance.sample(range(RANKS), 2)
        if chance.random() >= DOUBLED:
            return [first]
        if self.shards > 1 and first % self.shards == second % self.shards:
            second = (second + 1) % RANKS
        return [first, second]


TRAININGS = {
    "ddp": Training("torch,torch._dynamo,aelastic.training.rounds", 1),
    "hsdp": Training("torch,torch.distributed.fsdp,torch.distributed.device_mesh,aelastic.training.rounds", 2),
}


@dataclass(frozen=True)
class Checked:
    """A rank that has the state and begins the round's first step.

    Attributes:
        lost: steps that this rank, or the lost rank that it replaces, had committed and must repeat.
        at: CLOCK_MONOTONIC, in seconds.
    """

    round: int
    rank: int
    pid: int
    step: int
    lost: int
    at: float


@dataclass
class Figures:
    """Effects of the kills."""

    doubled: int = 0
    recovery_s: list[float] = field(default_factory=list)  # from the last kill of each series until all have the state
    lost_survivors: list[str] = field(default_factory=list)
    lost_steps: Counter[str] = field(default_factory=Counter[str])

    def summary(self, kills: int, steps: int) -> str:
        ms = sorted(1000 * each for each in self.recovery_s)
        return (
            f"{kills} kills, {self.doubled} of them within {1000 * DOUBLED_WITHIN_S:g} ms of another; {len(ms)} recoveries, "
            f"{statistics.median(ms):.0f} ms (median), {ms[len(ms) * 19 // 20]:.0f} ms (19 of 20), {ms[-1]:.0f} ms (longest); "
            f"{steps} steps; survivors lost: {len(self.lost_survivors)}; steps lost: {dict(self.lost_steps)}"
        )


class Team:
    """One agent with four workers, or two with two."""

    def __init__(self, launch: Launcher, training: Training, agents: int, name: str, steps: int = FOREVER) -> None:
        self.folder = launch.folder / name
        self.folder.mkdir()
        code = training.script(str(self.folder), steps)
        meeting = [
            f"--nnodes={agents}",
            "--rdzv-backend=c10d",
            "--rdzv-id=job",
            f"--rdzv-endpoint=127.0.0.1:{quiet_port()}",
        ]
        options = [
            f"--preload={training.modules}",
            "--max-restarts=100000",
            *(meeting if agents > 1 else []),
        ]
        # Workers are forked from the agent's template, as users' workers are.
        env = {"PYTHON_EXEC": sys.executable, "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "compiled")}
        self.jobs = [
            start(launch, code, *options, ranks=RANKS // agents, name=f"{name}-{each}", env=env)
            for each in range(agents)
        ]

    def lines(self, beginning: str) -> list[list[str]]:
        """The words of the lines with this beginning."""
        return [line.split()[1:] for job in self.jobs for line in job.lines if line.startswith(beginning + " ")]

    @property
    def story(self) -> str:
        return "\n".join(f"{job.folder.name}\n{job.story}" for job in self.jobs)

    def wait_round(
        self, after: int = -1, lost: Collection[int] = (), limit_s: float = RECOVERY_LIMIT_S
    ) -> dict[int, Checked]:
        """Waits for a round after `after` that all ranks have begun, without the lost processes; returns it by rank."""

        def newest() -> dict[int, Checked]:
            rounds: dict[int, dict[int, Checked]] = {}
            for number, rank, pid, step, lost_steps, at in self.lines("checked"):
                each = Checked(int(number), int(rank), int(pid), int(step), int(lost_steps), float(at))
                rounds.setdefault(each.round, {})[each.rank] = each
            ranks = rounds.get(max(rounds, default=-1), {})
            is_whole = len(ranks) == RANKS and not {each.pid for each in ranks.values()} & set(lost)
            return ranks if is_whole and ranks[0].round > after else {}

        found: dict[int, Checked] = wait_for(lambda: f"a round of all ranks\n{self.story}", newest, limit_s)
        return found

    def end(self) -> dict[int, set[str]]:
        """Ends the training; returns what the ranks compared, by step."""
        (self.folder / "go").touch()
        for job in self.jobs:
            assert job.wait(RECOVERY_LIMIT_S) == 0, job.story
            job.wait_nothing_left()
        return self.compared()

    def compared(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for step, _, digest in self.lines("at"):
            found.setdefault(int(step), set()).add(digest)
        return found


class Undisturbed:
    """The same training without kills, as far as needed."""

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._compared: dict[Training, dict[int, set[str]]] = {}

    def up_to(self, step: int, training: Training) -> dict[int, set[str]]:
        if step not in self._compared.get(training, {}):
            team = Team(self._launch, training, 1, f"undisturbed-{training.shards}-{step}", step + 1)
            for job in team.jobs:
                assert job.wait(10 * LAUNCH_TIMEOUT_S) == 0, job.story
            self._compared[training] = team.compared()
        return self._compared[training]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[Undisturbed]:
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"), warm)
    yield Undisturbed(launcher)
    launcher.close()


@pytest.mark.parametrize("seed", range(KILLED_JOBS))
@pytest.mark.parametrize("agents", [pytest.param(1, id="one"), pytest.param(2, marks=pytest.mark.ci, id="two")])
def test_kills_at_random_moments_cost_nothing(
    launch: Launcher, undisturbed: Undisturbed, agents: int, seed: int
) -> None:
    run(launch, undisturbed, TRAININGS["ddp"], agents, seed)


@pytest.mark.parametrize("seed", range(min(KILLED_JOBS, 3)))
@pytest.mark.parametrize("agents", [pytest.param(1, id="one"), pytest.param(2, id="two")])
def test_kills_cost_nothing_while_a_rank_of_each_shard_lives(
    launch: Launcher, undisturbed: Undisturbed, agents: int, seed: int
) -> None:
    run(launch, undisturbed, TRAININGS["hsdp"], agents, seed)


def run(launch: Launcher, undisturbed: Undisturbed, training: Training, agents: int, seed: int) -> None:
    chance = random.Random(f"{agents} {seed}")
    team, figures = Team(launch, training, agents, "job"), Figures()
    ranks, kills = team.wait_round(limit_s=3 * LAUNCH_TIMEOUT_S), 0
    while kills < KILLS:
        time.sleep(0.0 if chance.random() < AT_ONCE else chance.uniform(*PAUSE_S))
        victims = training.victims(chance)
        for number, victim in enumerate(victims):
            time.sleep(chance.uniform(0, DOUBLED_WITHIN_S) if number else 0)
            os.kill(ranks[victim].pid, signal.SIGKILL)
        last_kill_at = time.monotonic()
        after = team.wait_round(ranks[0].round, [ranks[victim].pid for victim in victims])
        kills += len(victims)
        figures.doubled += len(victims) - 1
        figures.recovery_s.append(max(each.at for each in after.values()) - last_kill_at)
        for rank in ranks.keys() - set(victims):
            if after[rank].pid != ranks[rank].pid:
                figures.lost_survivors.append(f"round {after[rank].round}: rank {rank}, process {ranks[rank].pid}")
            figures.lost_steps["of survivors"] += max(0, after[rank].lost)
        for rank in victims:
            figures.lost_steps["of lost ranks, beyond the one in flight"] += max(0, after[rank].lost - 1)
        ranks = after
    found = team.end()
    sys.stdout.write(
        f"\n{agents} agents, {training.shards} shards, seed {seed}: {figures.summary(kills, max(found))}\n"
    )
    assert not figures.lost_survivors, f"{figures.lost_survivors}\n{team.story}"
    assert not figures.lost_steps.total(), f"{figures.lost_steps}\n{team.story}"
    expected = undisturbed.up_to(max(found), training)
    assert found == {step: expected[step] for step in found}
    assert all(len(digests) == training.shards for digests in found.values()), "replicas have the same state"
