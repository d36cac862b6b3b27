"""A node is drained while its workers train: the others keep their state, or all save, depending on the script."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher
from kit.ports import quiet_port
from kit.verbs import verb
from kit.waiting import wait_for
from kit.workers.in_place_training import FAULT_AT, Shared, script, shared_in, start

from aelastic.errors import EXIT_TRY_AGAIN

pytestmark = [pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S), pytest.mark.ci, pytest.mark.all]

# From this step on, two nodes train slowly, one node fast.
UNTIL_DRAINED = """
def on_batch(step):
    if dist.get_world_size() == 4 and step >= FAULT_AT:
        if step == FAULT_AT:
            say("there", dist.get_rank())
        time.sleep(0.02)
"""
STEPS = 3000  # far more than a test has time for
ASKS = """
from aelastic import notice

def path():
    return os.environ["STAR"]


def load():
    if not os.path.exists(path()):
        return None
    saved = torch.load(path(), weights_only=False)
    for each, part in zip(state, saved["state"], strict=True):
        each.load_state_dict(part)
    return saved["step"]


def after_update(round, step):
    if notice.due():
        say("saves", step + 1)
        if dist.get_rank() == 0:
            torch.save({"step": step + 1, "state": [each.state_dict() for each in state]}, path() + ".new")
            os.replace(path() + ".new", path())
        notice.saved()


def steps(round, start):
    say("starts", start, os.getpid())
    return round.steps(start, STEPS if dist.get_world_size() == 4 else start + 3)
"""


FEW_ALONE = """
def steps(round, start):
    return round.steps(start, STEPS if dist.get_world_size() == 4 else start + 3)
"""


def drained(launch: Launcher, case: str, then: Callable[[Job], None] = lambda _: None) -> tuple[Job, Job]:
    """Two nodes train, and the second one is drained; returns both agents' jobs.

    Args:
        then: called with the first job after the request.
    """
    meeting = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{quiet_port()}", "--nnodes=1:2"]
    conf = "--rdzv-conf=last_call_timeout=3"
    env = {"STAR": str(launch.folder / "checkpoint")}
    code = script(UNTIL_DRAINED + case, steps=STEPS)
    first = start(launch, code, *meeting, conf, "--node-rank=0", ranks=2, name="n0", env=env)
    second = start(launch, code, *meeting, conf, "--node-rank=1", ranks=2, name="n1", env=env)
    for job in (first, second):
        job.wait_line("there", 2, LAUNCH_TIMEOUT_S)
    output = verb(second.folder, "drain", "--deadline", "60")
    assert output.code == 0, output
    then(first)
    second.wait(LAUNCH_TIMEOUT_S)
    first.assert_ends(limit_s=LAUNCH_TIMEOUT_S)
    assert second.process.returncode == EXIT_TRY_AGAIN, second.story
    return first, second


def rounds_of(shared: list[Shared]) -> tuple[set[Shared], set[Shared]]:
    """The first round's and the second round's."""
    assert len(shared) == 4, shared
    return set(shared[:2]), set(shared[2:])


def test_workers_that_do_not_ask_for_notices_keep_their_processes(launch: Launcher) -> None:
    first, _ = drained(launch, FEW_ALONE)
    assert_kept(first, FAULT_AT)


def assert_kept(job: Job, step: int) -> None:
    """Its workers kept their processes, and have the state of that step or a later one."""
    before, after = rounds_of(shared_in(job.lines))
    assert {each.pid for each in before} == {each.pid for each in after}, job.story
    assert {each.step >= step and each.restarts == 0 for each in after} == {True}, job.story
    assert "round 2 continues in place: 2 of 2 workers kept" in job.stderr, job.story


def test_a_round_that_ends_between_the_steps_of_two_optimizers_ends_for_a_worker_after_its_commit(
    launch: Launcher,
) -> None:
    """All ranks arrive at once, since none is lost: without the commit, nobody would have a whole state."""
    case = """
from aelastic.training import link

link._UPDATE_S = 1000.0


def update(step):
    scaler.step(optimizer)
    if dist.get_world_size() == 4 and step == FAULT_AT:
        say("there", dist.get_rank())
        while not os.path.exists(os.environ["STAR"]):
            time.sleep(0.01)
    scaler.step(second)
    scaler.update()
    scheduler.step()


def on_batch(step):
    pass
"""

    def let_go(job: Job) -> None:
        wait_for("the round has ended", lambda: "recovering in place" in job.stderr, LAUNCH_TIMEOUT_S)
        (launch.folder / "checkpoint").touch()

    first, _ = drained(launch, FEW_ALONE + case, let_go)
    assert_kept(first, FAULT_AT + 1)


def test_workers_that_ask_for_notices_save_at_one_step_and_start_again_from_it(launch: Launcher) -> None:
    first, second = drained(launch, ASKS)
    saves = {line for job in (first, second) for line in job.lines if line.startswith("saves ")}
    assert len(saves) == 1, first.story
    before, after = rounds_of(shared_in(first.lines))
    assert not {each.pid for each in before} & {each.pid for each in after}, first.story
    assert {f"saves {each.step}" for each in after} == saves, first.story
