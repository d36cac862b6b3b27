"""Recovery in place from a user's point of view: processes, options, environment, signals, and leftovers."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Job, Launcher, ran
from kit.waiting import wait_for
from kit.workers.in_place_training import FAULT_AT, course, script, start

pytestmark = pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S)
in_ci = [pytest.mark.all, pytest.mark.ci]


def test_the_others_keep_process_and_state_when_a_rank_is_killed(launch: Launcher, undisturbed: str) -> None:
    job = start(launch, script())
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0, 2, 3}, FAULT_AT), job.story
    assert found.end == undisturbed, job.story
    assert f"round 2 continues in place: 3 of 4 workers kept, state of step {FAULT_AT} from rank 0" in job.stderr


@pytest.mark.parametrize(
    "after_s", [pytest.param(0.0, marks=in_ci), pytest.param(0.02, marks=in_ci), pytest.param(0.05, marks=in_ci)]
)
def test_a_second_rank_may_be_killed_while_the_job_recovers(launch: Launcher, undisturbed: str, after_s: float) -> None:
    case = f"""
def follow():
    wait_for("dead")
    time.sleep({after_s})
    die()


forming = form


def form(round):
    if restarts() == 0 and os.environ["RANK"] == "2":
        threading.Thread(target=follow, daemon=True).start()
    forming(round)


def on_batch(step):
    if is_fault(step, 1):
        open("dead", "w").close()
        die()
"""
    job = start(launch, script(case))
    found = course(job)
    last = found.restarts
    assert (found.kept(0, last), found.step(last)) == ({0, 3}, FAULT_AT), job.story
    assert found.end == undisturbed, job.story


def assert_all_are_new(job: Job, undisturbed: str, why: str = "") -> None:
    """The job restarted once, in new processes, without the state, and logged why if some workers had opted in."""
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, set(), 0), job.story
    assert "recovering in place" not in job.stderr
    reasons = re.findall(r"not continuing in place: (.*); restarting all workers of this node", job.stderr)
    assert reasons == ([why] if why else []), job.story
    assert found.end == undisturbed, job.story


@pytest.mark.all
@pytest.mark.ci
def test_with_recovery_restart_all_processes_are_new(launch: Launcher, undisturbed: str) -> None:
    assert_all_are_new(start(launch, script(), "--recovery=restart"), undisturbed)


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("who", ["nobody", "one rank"])
def test_where_a_worker_has_not_opted_in_all_processes_are_new(launch: Launcher, undisturbed: str, who: str) -> None:
    case = f"""
from aelastic.training.rounds import SingleRound

if {who!r} == "nobody" or os.environ["RANK"] == "3":
    def in_place(function):
        return lambda: function(SingleRound())


def share(round):
    return 0  # all ranks have the same collectives
"""
    why = "rank 3 had not opted in" if who == "one rank" else ""
    assert_all_are_new(start(launch, script(case)), undisturbed, why)


# Reasons why rank 3 cannot recover in place: in the worker, or in the agent.
VARIABLE_IS_MISSING = """
if os.environ["RANK"] == "3":
    del os.environ["AELASTIC_IN_PLACE"]
"""
SOCKET_CANNOT_BE_OPENED = """
from aelastic.agent.channels import ControlSockets

path_of = ControlSockets.in_place_path


def in_place_path(self, attempt, local_rank):
    path = path_of(self, attempt, local_rank)
    return path if local_rank != 3 else f"/nowhere/{path}"


ControlSockets.in_place_path = in_place_path
"""


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize(
    "case, wrapper", [(VARIABLE_IS_MISSING, ""), ("", SOCKET_CANNOT_BE_OPENED)], ids=["no variable", "no socket"]
)
def test_a_rank_that_cannot_recover_in_place_shares_the_state_with_those_that_can(
    launch: Launcher, undisturbed: str, case: str, wrapper: str
) -> None:
    assert_all_are_new(start(launch, script(case), wrapper=wrapper), undisturbed, "rank 3 had not opted in")


NO_SOCKET_FOR_A_REPLACEMENT = """
from aelastic.agent.worker_links import WorkerLinks

listen = WorkerLinks.listen
WorkerLinks.listen = lambda self, local_rank, process: {} if process else listen(self, local_rank, process)
"""


@pytest.mark.all
@pytest.mark.ci
def test_a_replacement_without_a_socket_is_not_waited_for(launch: Launcher, undisturbed: str) -> None:
    job = start(launch, script(), wrapper=NO_SOCKET_FOR_A_REPLACEMENT)
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, set(), 0), job.story
    assert "not continuing in place: a replacement has no in-place socket; restarting all workers" in job.stderr
    assert found.end == undisturbed, job.story


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("launcher", ["torch.distributed.run", "python"])
def test_the_same_script_runs_without_aelastic(launch: Launcher, undisturbed: str, launcher: str) -> None:
    code = script("def on_batch(step): pass\n")
    path = launch.write("job/worker.py", code)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", **launch.warm.env}
    if launcher == "python":
        expected = course(start(launch, code, ranks=1, name="alone")).end
        done = ran(launch.warm.python, path, env=env, cwd=path.parent)
    else:
        expected = undisturbed
        done = ran(launch.warm.python, "-m", launcher, "--nproc-per-node=4", path, env=env, cwd=path.parent)
    assert done.returncode == 0, done.stderr
    assert f"end {expected}" in done.stdout.splitlines()


@pytest.mark.all
@pytest.mark.ci
def test_the_environment_of_a_living_process_is_that_of_its_round(launch: Launcher) -> None:
    """A survivor has the same agent-set variables as the replacement of another rank."""
    case = """
names = [
    "AELASTIC_ROUND", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_RUN_ID", "WORLD_SIZE",
    "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_NAME", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
]
sharing = share


def share(round):
    say("env", *(os.environ.get(name, "-") for name in names))
    say("rank", os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["ROLE_RANK"], round.number)
    return sharing(round)
"""
    job = start(launch, script(case), ranks=2)
    found = course(job)
    assert found.kept(0, 1) == {0}, job.story
    printed = [line.split()[1:] for line in job.lines if line.startswith("env ")]
    rounds = sorted({tuple(each) for each in printed}, key=lambda each: int(each[0]))
    assert [len(printed), len(rounds)] == [4, 2], "all ranks of a round have the same"
    (first, count, *_), (second, next_count, *_) = rounds
    assert int(first) < int(second) and (count, next_count) == ("0", "1")
    assert rounds[0][2:] == rounds[1][2:]
    ranks = sorted(line for line in job.lines if line.startswith("rank "))
    assert ranks == sorted(f"rank {each} {each} {each} {number}" for each in (0, 1) for number in (first, second))


FUNCTION = """
import asyncio, os, signal, sys

import torch
import torch.distributed as dist

from aelastic import LaunchConfig, Supervisor, WorkerSpec, elastic_launch, in_place

model = torch.nn.Linear(2, 2)


@in_place
def train(round, steps):
    dist.init_process_group("gloo")
    start = round.share(model)
    for step in round.steps(start, steps):
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and step == 3:
            dist.barrier()  # rank 0 is in this step, too, and has committed the one before
            if dist.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return start, os.environ["TORCHELASTIC_RESTART_COUNT"]


def descriptors():
    found = set()
    for name in os.listdir("/proc/self/fd"):
        if os.path.exists(f"/proc/self/fd/{name}"):
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def supervise(method):
    spec = WorkerSpec(entrypoint=train, args=(5,), local_world_size=2, max_restarts=3, start_method=method)
    return asyncio.run(Supervisor(spec).run()).return_values


def launch(method):
    config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=3, start_method=method)
    return elastic_launch(config, train)(5)


if __name__ == "__main__":
    run, method = globals()[sys.argv[1]], sys.argv[2]
    print(sorted(run(method).items()))
    if method == "fork":
        before = descriptors()
        print(sorted(run(method).items()))
        assert descriptors() == before
"""


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("launcher, method", [("supervise", "spawn"), ("supervise", "fork"), ("launch", "fork")])
def test_a_function_may_be_decorated(launch: Launcher, launcher: str, method: str, tmp_path: Path) -> None:
    path = launch.write("program.py", FUNCTION, preamble="")
    for name in "tmp", "run":
        (tmp_path / name).mkdir()
    folders = {"TMPDIR": str(tmp_path / "tmp"), "XDG_RUNTIME_DIR": str(tmp_path / "run")}
    done = ran(launch.warm.python, path, launcher, method, env={**os.environ, "OMP_NUM_THREADS": "1", **folders})
    assert done.returncode == 0, done.stderr
    returned = set(done.stdout.splitlines())
    assert returned == {"[(0, (3, '1')), (1, (3, '1'))]"}, "there is no checkpoint, so rank 0 has kept its state"
    assert not list((tmp_path / "tmp").iterdir())
    assert not [each for each in (tmp_path / "run").rglob("*") if each.is_socket()]


@pytest.mark.all
@pytest.mark.ci
def test_a_stop_while_the_job_recovers_ends_all(launch: Launcher) -> None:
    """Rank 2 does not leave its round; the agent is waiting for it when SIGTERM arrives."""
    case = """
def on_batch(step):
    if is_fault(step, 2):
        say("asleep")
        time.sleep(100)
    if is_fault(step, 1):
        wait_for("go")
        die()
"""
    job = start(launch, script(case))
    job.wait_line("asleep", limit_s=LAUNCH_TIMEOUT_S)
    job.go()
    wait_for("the recovery", lambda: "recovering in place" in job.stderr)
    job.signal(signal.SIGTERM)
    assert job.wait() == -signal.SIGTERM, job.story
    job.assert_nothing_left()
    assert "round 2" not in job.stderr


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.parametrize("packet", [b"garbage", b"{}", b'{"kind": "ready", "round": "x", "step": 0}', b"x" * 70000])
def test_what_is_not_a_message_is_refused_and_the_worker_has_not_opted_in(launch: Launcher, packet: bytes) -> None:
    code = f"""
import socket

path = os.environ["AELASTIC_IN_PLACE"].partition(":")[2]
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect(path)
try:
    connection.send({packet!r})
except OSError:
    pass
assert connection.recv(1) == b""  # the agent has closed it
assert not os.path.exists(path)
say("refused", rank, restart)
if restart == 0 and rank == 1:
    while not os.path.exists("rank 0 is refused"):
        time.sleep(0.01)
    sys.exit(1)
if restart == 0:
    open("rank 0 is refused", "w").close()
    rest()
"""
    job = start(launch, code, ranks=2)
    job.assert_ends(limit_s=LAUNCH_TIMEOUT_S)
    assert sorted(line for line in job.lines) == [f"refused {rank} {count}" for rank in (0, 1) for count in (0, 1)]
    assert job.stderr.count("closing the in-place socket of local rank") == 4, job.stderr
    assert "in place:" not in job.stderr


@pytest.mark.all
@pytest.mark.ci
def test_a_child_of_a_worker_finds_no_socket(launch: Launcher) -> None:
    """Its decorated function is called once, as it is outside of aelastic."""
    case = """
import subprocess

CHILD = "from aelastic import in_place; in_place(lambda round: print(type(round).__name__, round.share(), flush=True))()"


def on_end(round):
    if dist.get_rank() == 0:
        say("child", subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True).stdout)
        assert not [name for name in os.listdir(os.path.dirname(os.environ["AELASTIC_IN_PLACE"][2:])) if "in_place" in name]
"""
    job = start(launch, script(case), ranks=2)
    found = course(job)
    assert (found.restarts, found.kept(0, 1)) == (1, {0}), job.story
    assert "child SingleRound 0" in job.lines


@pytest.mark.all
@pytest.mark.ci
def test_rounds_that_end_before_all_have_the_state_are_followed_by_new_processes(launch: Launcher) -> None:
    case = """
sharing = share


def on_batch(step): pass


def share(round):
    if 0 < restarts() < 5 and os.environ["RANK"] == "1":
        die()
    return sharing(round)


def after_update(round, step):
    if is_fault(step, 1):
        die()
"""
    job = start(launch, script(case), ranks=2)
    found = course(job)
    assert found.kept(0, found.restarts) == set(), job.story
    assert found.step(found.restarts) == 0, job.story
