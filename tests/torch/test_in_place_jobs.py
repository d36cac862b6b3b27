"""Recovery in place together with hang detection, progress, averaged weights, and nodes that join and leave."""

from __future__ import annotations

import re
import signal
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher
from kit.ports import quiet_port
from kit.verbs import json_of, verb
from kit.waiting import wait_for
from kit.workers.in_place_training import FAULT_AT, RANKS, STEPS, course, script, shared_in, start

pytestmark = [pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S), pytest.mark.all]

TIMEOUT_S = 2
WARNING = "with --max-restarts 0, the first failure ends the job"

# In an agent: it has no samples before all workers are in place.  On a busy machine they would be found while they wait
# for each other at the start, and for the replacement later.
TOGETHER = f"""
import os
from aelastic.agent.watches import activity

class Table(activity.ProcTable):
    def __call__(self, places, rules):
        is_all = all(os.path.exists(f"there{{rank}}") for rank in range({RANKS}))
        return super().__call__(places, rules) if is_all else {{}}

activity.ProcTable = Table
"""
# In a worker.  The replacement of a stuck worker removes its file.
THERE = """
def stay():
    open(f"there{os.environ['RANK']}", "w").close()


if os.path.exists(f"there{rank}"):
    os.remove(f"there{rank}")
"""


def start_with_timeout(launch: Launcher, case: str) -> Job:
    """Workers forked by the agent itself: in the tests' warm interpreters, the place in the script would differ."""
    options = f"--hang-timeout={TIMEOUT_S}", "--preload=torch,torch._dynamo,aelastic.training.rounds"
    env = {"PYTHON_EXEC": sys.executable, "TORCHINDUCTOR_CACHE_DIR": str(launch.folder / "compiled")}
    return start(launch, script(THERE + case), *options, wrapper=TOGETHER, env=env)


@pytest.mark.parametrize("disposition, buffers", [
    ("SIG_DFL", False),
    ("SIG_IGN", False),
    pytest.param("SIG_DFL", True, marks=pytest.mark.ci),
], ids=["ends with SIGTERM", "ignores SIGTERM", "others wait for buffers"])  # fmt: skip
def test_a_rank_that_hangs_is_found_and_replaced(
    launch: Launcher, undisturbed: str, disposition: str, *, buffers: bool
) -> None:
    """The others wait for it in the backward pass, or in the broadcast of buffers before the forward pass."""
    case = f"""
def wrap():
    return DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers={buffers})


def on_batch(step):
    if is_fault(step, 0, 1, 2, 3):
        stay()
    if is_fault(step, 1):
        signal.signal(signal.SIGTERM, signal.{disposition})
        time.sleep(1000)
"""
    job = start_with_timeout(launch, case)
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, FAULT_AT), job.story
    assert found.end == undisturbed, job.story
    stopped = re.findall(r"rank (\d) on \S+ is stopped: hang: ", job.stderr)
    assert stopped == ["1"], job.stderr
    assert re.search(r"hang: 3 of 4 ranks wait in .*; rank 1 on \S+ does not: on_batch \(worker\.py:\d+\)", job.stderr)
    assert WARNING not in job.stderr


@pytest.mark.ci
def test_of_ranks_that_wait_at_one_place_the_one_with_fewer_steps_is_replaced(
    launch: Launcher, undisturbed: str
) -> None:
    """Rank 2 waits for the others before it commits its step, and they wait for it in the next one."""
    case = """
forming = form


def form(round):
    global side
    forming(round)
    side = dist.new_group()


def meet(group):
    stay()
    dist.barrier(group)


def after_update(round, step):
    if is_fault(step, 2):
        meet(side)


def on_batch(step):
    if is_fault(step, 0, 1, 3, at=FAULT_AT + 1):
        meet(dist.group.WORLD)
"""
    job = start_with_timeout(launch, case)
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 1, 3}, FAULT_AT + 1), job.story
    assert found.end == undisturbed, job.story
    place = r"barrier \(worker\.py:\d+\)"
    assert re.search(
        rf"hang: 3 of 4 ranks wait in {place}.*; rank 2 on \S+ has done \d+ steps, the others \d+: {place}", job.stderr
    ), job.stderr


@pytest.mark.ci
def test_committed_steps_are_the_progress_of_the_job(launch: Launcher) -> None:
    """In each round, even if the rank that reports for all is a replacement."""
    later = FAULT_AT + 10
    case = f"""
def on_batch(step):
    if is_fault(step, 0, 1, 2, 3):
        say("first", step)
        wait_for("go")
    if is_fault(step, 0):
        die()
    if step == {later}:
        dist.barrier()
        say("second", step)
        wait_for("go-on")
"""
    job = start(launch, script(case))
    for line, file, step, recoveries in ("first", "go", FAULT_AT, 0), ("second", "go-on", later, 1):
        job.wait_line(line, RANKS, LAUNCH_TIMEOUT_S)
        (node,) = json_of(job.folder, "status")["nodes"]
        progress = node["progress"]
        assert (progress["rank"], progress["step"], progress["total"]) == (0, step, None), node
        assert node["recoveries"] == recoveries
        assert f"step {step}" in verb(job.folder, "status").out
        (job.folder / file).touch()
    found = course(job)
    assert found.kept(0, 1) == {1, 2, 3}, job.story


@pytest.mark.ci
def test_committed_steps_have_a_pace_while_nobody_asks(launch: Launcher) -> None:
    job = start(launch, script("def on_batch(step): pass\n", steps=10**9), ranks=2)
    job.wait_line("shared", 2, LAUNCH_TIMEOUT_S)

    def measured() -> Any:
        (node,) = json_of(job.folder, "status")["nodes"]
        progress = node["progress"]
        return progress if progress is not None and progress["steps_per_s"] else None

    progress = wait_for("a pace", measured)
    assert progress["steps_per_s"] > 0 and progress["step"] > 0 and progress["remaining_s"] is None, progress
    job.signal(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM, job.story
    job.assert_nothing_left()


@pytest.mark.ci
def test_without_a_restart_the_first_failure_ends_the_job_as_a_warning_at_the_start_said(launch: Launcher) -> None:
    case = """
def on_batch(step):
    if is_fault(step, 0, 1, 2, 3):
        say("there")
        wait_for("go")
    if is_fault(step, 1):
        die()
"""
    job = start(launch, script(case), "--max-restarts=0")
    job.wait_line("there", RANKS, LAUNCH_TIMEOUT_S)
    assert job.stderr.count(WARNING) == 1, job.stderr
    job.go()
    assert job.wait(LAUNCH_TIMEOUT_S) == 128 + signal.SIGKILL, job.story
    job.assert_nothing_left()
    assert job.stderr.count(WARNING) == 1 and "recovering in place" not in job.stderr, job.stderr
    assert {each.restarts for each in shared_in(job.lines)} == {0}, job.story


AVERAGED = """
import hashlib

ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
state += [ema]


def after_update(round, step):
    before_average(step)
    ema.update_parameters(model)


def on_end(round):
    digest = hashlib.sha256()
    for name, value in ema.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    say("averaged", dist.get_rank(), int(ema.n_averaged), digest.hexdigest())


def on_batch(step): pass


def before_average(step): pass


"""


@pytest.mark.ci
@pytest.mark.parametrize("moment", ["on_batch", "before_average"])
def test_averaged_weights_are_those_of_the_undisturbed_training(launch: Launcher, moment: str) -> None:
    case = f"""
def {moment}(step):
    if is_fault(step, 1):
        die()
"""
    jobs = [start(launch, script(AVERAGED + more), name=name) for more, name in (("", "undisturbed"), (case, "killed"))]
    undisturbed, found = map(course, jobs)
    assert (found.restarts, found.kept(0, 1)) == (1, {0, 2, 3}), jobs[1].story
    assert found.step(1) >= FAULT_AT, jobs[1].story
    expected, averaged = (sorted(line for line in job.lines if line.startswith("averaged ")) for job in jobs)
    assert len(expected) == RANKS and all(f" {STEPS} " in line for line in expected), expected
    assert averaged == expected
    assert found.end == undisturbed.end, jobs[1].story


# Several nodes.


@dataclass(frozen=True)
class Member:
    """A rank in one round, once it has the state."""

    round: int
    world_size: int
    rank: int
    pid: int
    step: int


# Each rank reports in each round, and its weights at the end.
MEMBERS = """
import hashlib

sharing = share


def share(round):
    step = sharing(round)
    say("member", round.number, dist.get_world_size(), dist.get_rank(), os.getpid(), step)
    return step


def on_end(round):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    say("weights", digest.hexdigest())
"""


def members(*jobs: Job) -> dict[int, dict[int, Member]]:
    """Members by round and rank."""
    found: dict[int, dict[int, Member]] = {}
    for job in jobs:
        for line in job.lines:
            if line.startswith("member "):
                member = Member(*map(int, line.split()[1:]))
                found.setdefault(member.round, {})[member.rank] = member
    return found


def pids(ranks: dict[int, Member]) -> set[int]:
    return {member.pid for member in ranks.values()}


def nodes(nnodes: str) -> list[Any]:
    return [
        f"--nnodes={nnodes}",
        "--rdzv-backend=c10d",
        "--rdzv-id=job",
        f"--rdzv-endpoint=127.0.0.1:{quiet_port()}",
        "--rdzv-conf=last_call_timeout=1",
    ]


@pytest.mark.ci
def test_a_node_joins_and_the_others_continue_from_their_step_with_more_ranks(launch: Launcher) -> None:
    """They train until it has joined, and then for five more steps."""
    case = """
def steps(round, start):
    return round.steps(start, start + 5 if dist.get_world_size() == 6 else STEPS)


def on_batch(step):
    if step == 3:
        say("trains")
"""
    code, meeting = script(MEMBERS + case, steps=10**9), nodes("2:3")
    first = [start(launch, code, *meeting, ranks=2, name=name) for name in ("n0", "n1")]
    for job in first:
        job.wait_line("trains", 2, LAUNCH_TIMEOUT_S)
    late = start(launch, code, *meeting, ranks=2, name="n2")
    for job in (late, *first):
        job.assert_ends(limit_s=LAUNCH_TIMEOUT_S)

    by_round = members(*first, late)
    assert len(by_round) == 2, by_round
    before, after = (by_round[number] for number in sorted(by_round))
    assert (sorted(before), sorted(after)) == ([*range(4)], [*range(6)]), by_round
    assert {member.world_size for member in after.values()} == {6}
    assert pids(before) < pids(after) and pids(after) - pids(before) == pids(members(late)[after[0].round])
    steps = {member.step for member in after.values()}
    assert len(steps) == 1 and min(steps) >= 3, by_round
    weights = [line for job in (*first, late) for line in job.lines if line.startswith("weights ")]
    assert len(weights) == 6 and len(set(weights)) == 1, weights


@pytest.mark.ci
@pytest.mark.parametrize("has_rank_0", [True, False], ids=["the node of rank 0", "the other node"])
def test_a_node_is_lost_and_the_workers_of_a_spare_take_its_place(
    launch: Launcher, undisturbed: str, *, has_rank_0: bool
) -> None:
    case = """
say("arrives", "ahead" if "MASTER_ADDR" not in os.environ else "in a round")


def on_batch(step):
    if is_fault(step, 0, 1, 2, 3):
        say("there")
        wait_for("go")
"""
    code, meeting = script(MEMBERS + case), nodes("2")
    jobs = [start(launch, code, *meeting, ranks=2, name=name) for name in ("n0", "n1")]
    for job in jobs:
        job.wait_line("there", 2, LAUNCH_TIMEOUT_S)
    spare = start(launch, code, *meeting, ranks=2, name="spare")
    spare.wait_line("arrives ahead", 2, LAUNCH_TIMEOUT_S)
    (first,) = (job for job in jobs if any(0 in ranks for ranks in members(job).values()))
    (second,) = (job for job in jobs if job is not first)
    lost, rest = (first, second) if has_rank_0 else (second, first)
    lost.process.kill()
    for job in rest, spare:
        job.go()
    for job in rest, spare:
        job.assert_ends(limit_s=LAUNCH_TIMEOUT_S)

    by_round = members(*jobs, spare)
    assert len(by_round) == 2, by_round
    before, after = (by_round[number] for number in sorted(by_round))
    assert sorted(before) == sorted(after) == [*range(4)], by_round
    assert {member.step for member in after.values()} == {FAULT_AT}, by_round
    assert pids(before) & pids(after) == pids(members(rest)[after[0].round]), by_round
    assert len(pids(before) & pids(after)) == 2 and "recovering in place" in rest.stderr
    assert {line for line in spare.lines if line.startswith("arrives ")} == {"arrives ahead"}
    weights = [line for job in (rest, spare) for line in job.lines if line.startswith("weights ")]
    assert len(weights) == 4 and len(set(weights)) == 1, weights
    if not has_rank_0:  # its buffers are the model's
        assert [line for line in rest.lines + spare.lines if line.startswith("end ")] == [f"end {undisturbed}"]
