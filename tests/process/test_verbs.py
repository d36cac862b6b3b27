"""Commands to a running job, through its agent's control socket, from a shell and from a program."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kit.launching import Job, Launcher, on_each_loop, ran, run, stand_still
from kit.stories.timelines import boxes_of, data_of
from kit.verbs import json_of, verb
from kit.waiting import DEADLINE_S, wait_for

from aelastic import Supervisor, WorkerSpec
from aelastic.base.host import control_sockets
from aelastic.cli.timeline import main as timeline
from aelastic.cli.verbs import asking, jobs
from aelastic.errors import EXIT_TRY_AGAIN, RequestError
from aelastic.observe.run_events import RunEnded, WorkersStarted
from aelastic.workers.states import WorkerState

# Steps of 10 ms; resumes from its last save.
TRAINS = """
from aelastic import notice
saved = f"saved-{rank}"
step = int(open(saved).read()) if os.path.exists(saved) else 0
say("start", rank, restart, step)
while not os.path.exists("end"):
    step += 1
    time.sleep(0.01)
    if step == 5:
        print("five of", rank, file=sys.stderr)
    if notice.due():
        open(saved, "w").write(str(step))
        notice.saved()
"""
TWO = "--nproc-per-node", "2"
# In an agent: enough time to answer on a busy machine.
PATIENT = """
from aelastic.agent.requests import queries
from aelastic.diagnose.stacks import collect

queries.ANSWER_S = queries.STACKS_S = 28.0
collect.MEMORY_UNTIL_S, collect.PY_SPY_UNTIL_S, collect.TIMEOUT_S = 19.0, 20.0, 25.0
"""


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the asking side more time as well."""
    monkeypatch.setattr(jobs, "ANSWER_S", DEADLINE_S)


def trains(launch: Launcher, *options: str, loop: str = "uvloop") -> Job:
    job = launch(TRAINS, *TWO, *options, loop=loop, wrapper=PATIENT)
    job.wait_line("start", 2)
    return job


@on_each_loop
def test_one_job_is_asked_everything_and_stopped_and_says_afterwards_why(
    launch: Launcher, loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = trains(launch, "--max-restarts=0", loop=loop)
    here = job.folder
    (run_id,) = [each["run"]["run_id"] for each in json_of(here, "ps")["jobs"]]
    wait_for("both run", lambda: json_of(here, "status")["nodes"][0]["phase"] == "running")
    code, out, _ = verb(here, "status")
    head, program, columns, node, star = out.splitlines()
    assert code == 0 and head.startswith(f"{run_id}  running  ") and columns.split() == [
        "NODE", "STATE", "RANKS", "SINCE", "NOTE",
    ]  # fmt: skip
    assert node.split()[1:4] == ["*", "running", "0-1"]
    assert re.fullmatch(r".*worker\.py in /.*", program) and star.startswith("* the leader: ")
    code, out, _ = verb(here, "stacks")
    assert code == 0 and out.count("--- rank ") == 2 and "worker.py" in out
    assert verb(here, "stacks", "1").out.count("--- rank 1") == 1 and "--- rank 0" not in verb(here, "stacks", "1").out
    assert verb(here, "status", run_id[:5]).code == 0
    assert verb(here, "why").out == "no workers have ended so far\n"
    for argv, code, words in CANNOT:
        output = verb(here, *argv)
        assert output.code == code and words in output.err and output.err.count("\n") == 0, (argv, output)
    assert_odd_requests_are_refused(job)
    with monkeypatch.context() as patched:
        patched.setattr(jobs, "ANSWER_S", 0.3)
        stand_still(job.pid)
        # A request to an unresponsive agent may still be carried out; a job that does not answer has not ended.
        assert json_of(here, "ps")["code"] == "no-answer"
        job.signal(signal.SIGCONT)
    assert len(job.wait_line("start")) == 2, "the job continues"

    code, out, _ = verb(here, "restart", "--at-save", "--wait", "--reason", "new data")
    assert code == 0 and ": all ranks save at call " in out and "all ranks have saved" in out, job.story
    assert "running again after " in out.splitlines()[-1]
    starts = [line.split() for line in job.wait_line("start", 4)]
    assert {each[3] for each in starts[:2]} == {"0"} and len({each[3] for each in starts[2:]}) == 1
    assert int(starts[2][3]) > 0 and {each[2] for each in starts} == {"0"}, "no restart is counted"
    assert verb(here, "restart", "--wait").code == 0
    assert len(job.wait_line("start", 6)) == 6
    why = json_of(here, "why", "-n", "2")["why"]
    assert [each["generation"] for each in why] == [2, 1] and "new data" in why[1]["reason"]

    for to, code, words in (("ps > /dev/full", 4, NO_ROOM), ("status >&-", 0, ""), ("stop > /dev/full", 4, NO_ROOM)):
        command, env = f'"{sys.executable}" -m aelastic {to}', {**os.environ, "XDG_RUNTIME_DIR": str(here)}
        done = subprocess.run(
            command, shell=True, cwd=here, env=env, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
        assert done.returncode == code and done.stderr.startswith(words), "an unwritable stdout is not a refusal"
        assert done.stderr.count("\n") == bool(words), done
    job.assert_ends(-signal.SIGTERM)
    output = verb(here, "status")
    assert output.code == 3 and ", STOPPED; see aelastic why)" in output.err


NO_ROOM = "aelastic: stdout cannot be written: "
CANNOT = [
    (("logs", "0"), 1, "its output is not kept"),
    (("logs", "7"), 1, "no rank 7; there are 0, 1"),
    (("logs", "x"), 2, "error: logs: 'x' is not a rank: use a number"),
    (("stacks", "0", "-1"), 2, "error: stacks: "),
    (("status", "one", "two"), 2, "error: status: unrecognized arguments: two"),
    (("stop", "one", "--job", "two"), 2, "error: stop: one and --job two are two jobs: name one"),
    (("drain",), 1, ": this ends the job: no node would be left; --force drains "),
    (("stop", "--at-save", "--now"), 2, "--at-save lets workers save, --now kills them: use one of the two"),
    (("stacks", "9"), 1, "no rank 9; there are 0 to 1"),
    (("status", "other"), 3, "no job other of yours runs on this machine"),
    (("drain", "nowhere"), 1, "no node nowhere"),
    (("drain", "nowhere", "--wait"), 1, "no node nowhere"),
    (("restart", "--reason", "r" * 1001), 2, "use at most 1,000 characters"),
    (("drain", "--cancel"), 1, "is not asked to leave"),
    (("drain", "--deadline", "0"), 2, "use seconds, at least 1"),
    (("drain", "x" * 256), 2, "use a host name or a node id of at most 255 characters"),
    (("cordon", "x" * 256), 2, "use a host name or a node id of at most 255 characters"),
    (("uncordon", "x" * 256), 2, "use a host name or a node id of at most 255 characters"),
    (("drain", "--deadline", "1e9"), 2, "use at most 1,000,000 seconds"),
    (("restart", "--deadline", "soon"), 2, "use seconds, at least 1"),
    (("why", "-n", "0"), 2, "use a number, at least 1"),
    (("stop", "--nonsense"), 2, "unknown option --nonsense"),
]


def assert_odd_requests_are_refused(job: Job) -> None:
    """An invalid request is refused with a reason; a client that floods is disconnected."""
    folder = control_sockets.folder_of({"XDG_RUNTIME_DIR": str(job.folder)})
    (name,) = control_sockets.names_in(folder)
    bad = [b"\n", b"{}\n", b"[1]\n", b"[" * 60_000 + b"\n", b'{"verb": 7}\n', b'{"verb": "logs", "rank": "x"}\n']
    bad += [b'{"verb": "logs", "rank": 1e999}\n', b'{"verb": "drain", "node": "%s"}\n' % (b"n" * 300)]
    for which, deadline in (("drain", "NaN"), ("drain", "Infinity"), ("restart", "1e300")):
        bad += [f'{{"verb": "{which}", "deadline_s": {deadline}, "at_save": true}}\n'.encode()]
    for data in (b"", b"x" * 200_000, *bad):
        conn, answer = control_sockets.connect(folder, name, 10.0), b""
        assert conn is not None
        with conn:
            try:
                conn.sendall(data)
                conn.shutdown(socket.SHUT_WR)
                while received := conn.recv(1 << 16):
                    answer += received
            except OSError:
                pass  # it was closed before everything was sent
        assert data not in bad or b'"refused"' in answer, (data, answer)
    assert verb(job.folder, "status").code == 0


def test_a_worker_that_writes_to_files_is_read(launch: Launcher) -> None:
    job = launch(TRAINS, *TWO, "--redirects", "3", "--log-dir", "logs", wrapper=PATIENT)
    wait_for("it answers", lambda: json_of(job.folder, "status")["code"] == "ok")
    assert json_of(job.folder, "logs", "1", "--stderr").get("data", "") in {"", "five of 1\n"}
    wait_for("it writes", lambda: verb(job.folder, "logs", "1", "--stderr").out == "five of 1\n")
    wait_for("rank 0 has started, too", lambda: verb(job.folder, "logs", "0").out == "start 0 0 0\n")
    followed = subprocess.Popen(
        [sys.executable, "-m", "aelastic", "logs", "0", "-f", "--stderr"],
        env={**os.environ, "XDG_RUNTIME_DIR": str(job.folder)}, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert followed.stdout is not None and followed.stdout.readline() == b"five of 0\n"
    assert verb(job.folder, "restart", "--wait").code == 0
    assert followed.stdout.readline() == b"five of 0\n", "the log of the newer workers is shorter at first"
    (job.folder / "end").touch()
    assert job.wait() == 0 and followed.wait(DEADLINE_S) == 0
    followed.stdout.close()


def test_one_job_whose_id_begins_that_of_another_is_stopped_once_all_have_saved_the_other_at_once(
    launch: Launcher,
) -> None:
    here = {"XDG_RUNTIME_DIR": str(launch.folder)}
    jobs = [launch(TRAINS, "--rdzv-id", run_id, name=run_id, env=here) for run_id in ("exp", "exp2")]
    for job in jobs:
        job.wait_line("start")
    assert verb(launch.folder, "status", "exp").out.startswith("exp  ")
    output = verb(launch.folder, "status", "ex")
    words = (
        r"aelastic: 2 jobs run on this machine; name one, as in aelastic status exp2?: exp \(.* in /.*\), exp2 \(.*\)"
    )
    assert output.code == 2 and re.fullmatch(words, output.err), output
    for argv, words in MISTAKEN:
        output = verb(launch.folder, *argv)
        assert output.code == 2 and output.err.startswith(f"aelastic: error: {words} (see aelastic "), output
    assert verb(launch.folder, "stop", "exp", "--reason", "enough", "--at-save").out.startswith(
        "exp: stop requested on "
    )
    jobs[0].assert_ends(EXIT_TRY_AGAIN)
    assert "all ranks have saved; all workers have ended; run the same command again to resume" in jobs[0].stderr, jobs[
        0
    ].story
    output = verb(launch.folder, "stop", "--job", "exp")
    assert output.code == 3 and "no job exp of yours runs on this machine; give the whole id of exp2" in output.err
    # A colleague may use the same account: jobs from other folders are listed as such.
    (elsewhere := launch.folder / "elsewhere").mkdir()
    for typed, command in (("stop --now", "stop exp2 --now"), ("drain vm", "drain --job exp2 vm")):
        output = verb(launch.folder, *typed.split(), cwd=elsewhere)
        folder = f"job exp2 was started in {jobs[1].folder}, not in this folder"
        assert output.code == 2 and output.err == f"aelastic: {folder}; to act on it anyway: aelastic {command}", output
    assert verb(launch.folder, "status", cwd=elsewhere).code == 0, "it does nothing to the job"
    assert verb(launch.folder, "stop", "--now", "--job", "exp2", cwd=elsewhere).code == 0
    assert jobs[1].wait() == -signal.SIGTERM and "; all workers have ended" in jobs[1].stderr
    for which in ("exp", "exp2"):
        output = verb(launch.folder, "status", which)
        assert output.code == 3 and re.match(
            rf"aelastic: {which} ended \d+ s ago: stop .*; see aelastic why {which}$", output.err
        )
    assert verb(launch.folder, "why", "exp2").code == 0
    assert "(by root: enough)" in verb(launch.folder, "why", "exp").out or os.getuid()


# With two jobs, `exp` and `exp2`.
MISTAKEN = [
    (("drain", "exp"), "drain: exp is a job; did you mean --job exp?"),
    (("cordon", "exp2"), "cordon: exp2 is a job; did you mean --job exp2?"),
    (("logs", "exp"), "logs: exp is a job; did you mean --job exp?"),
    (("logs", "exp", "0"), "logs: exp is a job; did you mean --job exp?"),
    (("logs", "0", "exp"), "logs: exp is a job; did you mean --job exp?"),
    (("stacks", "0", "exp"), "stacks: exp is a job; did you mean --job exp?"),
    (("stacks", "ex"), "stacks: 'ex' is not a rank: use a number"),
]


def test_a_job_that_has_succeeded_is_known_to_have_ended(launch: Launcher) -> None:
    job = launch("pass", "--rdzv-id", "demo")
    assert job.wait() == 0
    output = verb(job.folder, "status", "demo")
    assert output.code == 3 and re.fullmatch(r"aelastic: demo ended \d+ s ago: every worker succeeded", output.err)
    output = verb(job.folder, "why")
    assert output.code == 0 and output.out.endswith("ago: every worker succeeded\n")


def test_why_a_job_ended_is_known_by_its_logs_too_and_they_make_a_picture(
    launch: Launcher, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "say('start')\nif rank == 1: raise ValueError('odd')\ntime.sleep(600)\n"
    job = launch(script, *TWO, "--max-restarts", "1", "--log-dir", "logs")
    assert job.wait() == 1
    logs = str(job.folder / "logs")
    lived, read = (json_of(job.folder, "why", *of, "-n", "5")["why"] for of in ((), (logs,)))
    assert len(read) == 2
    for chain in [each.pop("chain") for each in read]:
        assert [link["text"] for link in chain][:2] == ["rank 1 exited", "it is known why rank 1 exited"]
        assert [link["after_s"] for link in chain] == sorted(link["after_s"] for link in chain)
    for each in (*lived, *read):
        each["failure"].pop("at")  # a log has more digits of it
        del each["at"], each["cause"]
        each["after_s"], each["again_s"] = each["after_s"] > 0, each["again_s"] is not None
    assert read == lived
    for out in (verb(job.folder, "why").out, verb(tmp_path, "why", logs).out):
        assert "  cause    rank 1 on " in out and "ValueError: odd" in out, out
        assert re.search(r"^  symptom  rank 1 on \S+ exited with code 1$", out, re.MULTILINE), out
        assert "\n  changed  by a larger --max-restarts" in out, out
    assert re.search(r"^  steps    \+0 ms +rank 1 exited \(\S+\)$", out, re.MULTILINE), "the logs show the steps"
    monkeypatch.setattr(jobs, "ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:  # the agent of another job, which does not answer
        silent.bind(str(job.folder / "aelastic" / "1.sock"))
        silent.listen()
        assert verb(job.folder, "why").code == 4
        assert json_of(job.folder, "why", logs)["code"] == "ok"
    assert timeline([logs]) == 0 and "1 restart (" in capsys.readouterr().out
    page = (job.folder / "logs" / "timeline.html").read_text()
    assert "ValueError: odd" in page and boxes_of(data_of(page), "life", "failed")
    (other := tmp_path / "other").mkdir()
    (other / "empty").touch()
    no_log = "no event log here (events.jsonl, up to 3 folders deep); agents write one into --log-dir"
    for path, words in ((other, no_log), (other / "empty", "no record of a run")):
        output = verb(tmp_path, "why", str(path))
        assert output.code == 2 and output.err == f"aelastic: error: {path}: {words}" and not output.out, output
        assert json_of(tmp_path, "why", str(path))["code"] == "usage"
    nowhere = tmp_path / "nowhere"
    output = verb(tmp_path, "why", str(nowhere))
    assert (output.code, output.err) == (2, f"aelastic: error: {nowhere}: no such file or folder"), output


def test_an_agent_that_does_not_answer_may_yet_do_it(launch: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "ANSWER_S", 0.3)
    job = trains(launch)
    stand_still(job.pid)
    output = verb(job.folder, "restart")
    assert output.code == 4 and "the request may or may not have been carried out" in output.err
    folder = job.folder / "aelastic"
    assert {path.suffix for path in folder.iterdir()} == {".sock"}
    assert folder.stat().st_mode & 0o777 == 0o700 and all(path.stat().st_mode & 0o77 == 0 for path in folder.iterdir())
    job.signal(signal.SIGKILL)
    job.wait()
    assert verb(job.folder, "ps").code == 3
    assert [*folder.iterdir()] == [], "a killed agent's socket is removed"


def test_what_a_node_says_of_itself_does_nothing_to_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    asked = asking._Asking(["status"], argparse.Namespace(json=False, job=""), Path(), print)
    assert asked._conclude({"code": "ok"}, "NODE\nn1 \x1b[2J\x1b]0;title\x07gone") == 0
    printed = capsys.readouterr().out
    assert printed.startswith("NODE\nn1 ") and not set(printed) & {"\x1b", "\x07"}


def test_a_login_session_that_ends_takes_no_door_away() -> None:
    user, usual = os.getuid(), Path(f"/tmp/aelastic-{os.getuid()}")
    for given in ({}, {"XDG_RUNTIME_DIR": f"/run/user/{user}"}, {"XDG_RUNTIME_DIR": "relative"}):
        assert control_sockets.folder_of(given) == usual
    assert control_sockets.folder_of({"XDG_RUNTIME_DIR": "/run/job"}) == Path("/run/job/aelastic")


def test_a_folder_that_others_may_write_to_is_not_used(launch: Launcher) -> None:
    (launch.folder / "open").mkdir()
    (launch.folder / "open" / "aelastic").mkdir(mode=0o777)
    (launch.folder / "open" / "aelastic").chmod(0o777)
    job = launch(TRAINS, env={"XDG_RUNTIME_DIR": str(launch.folder / "open")})
    job.wait_line("start")
    assert (
        "W no control socket, so aelastic status cannot reach this job" in job.stderr
        and "is open to other users" in job.stderr
    )
    output = verb(launch.folder / "open", "status")
    assert output.code == 1 and "is open to other users: remove it, or chmod 700 it" in output.err
    assert json_of(launch.folder / "open", "status")["code"] == "not-allowed"
    (job.folder / "end").touch()
    assert job.wait() == 0


def test_a_script_of_a_verbs_name_is_run_by_its_path_or_after_a_flag(launch: Launcher) -> None:
    script = launch.write("status", "say('the script')")
    for argv in (("./status",), ("--nproc-per-node=1", "status")):
        done = ran(sys.executable, "-m", "aelastic", *argv, cwd=script.parent)
        assert done.returncode == 0 and "the script" in done.stdout, done.stderr
    env = {**os.environ, "XDG_RUNTIME_DIR": str(script.parent)}
    done = ran(sys.executable, "-m", "aelastic", "status", cwd=script.parent, env=env)
    assert done.returncode == 3 and "status runs the command of that name; to run the file, use ./status" in done.stderr


# In a program.

SLEEPS = "import time; time.sleep(600)"


async def begins(supervisor: Supervisor) -> None:
    async for event in supervisor.events():
        if isinstance(event, WorkersStarted):
            return


def test_a_program_speaks_to_its_job() -> None:
    async def main() -> None:
        supervisor = Supervisor(WorkerSpec(entrypoint=sys.executable, args=("-c", SLEEPS), local_world_size=2))
        seen = list[str]()

        async def listen() -> None:
            async for event in supervisor.events():
                seen.append(type(event).__name__)

        with pytest.raises(RequestError, match="the job is not running: the run has not begun, or has ended"):
            await supervisor.restart()
        listening, running = asyncio.create_task(listen()), asyncio.create_task(supervisor.run())
        await begins(supervisor)
        assert [each["phase"] for each in await supervisor.status()] == ["running"]
        again = asyncio.create_task(begins(supervisor))
        await asyncio.sleep(0)
        await supervisor.restart("try")
        await again
        assert [each["round"]["generation"] for each in await supervisor.status()] == [2]
        with pytest.raises(RequestError, match="too short to save"):
            await supervisor.stop_job(at_save_s=0.1)
        await supervisor.stop_job("enough")
        result = await running
        await listening
        assert result.is_stopped and result.state is WorkerState.STOPPED and "enough" in result.reason
        assert seen[-1] == RunEnded.__name__ and "Restarting" in seen
        with pytest.raises(RequestError, match="the job is not running"):
            await supervisor.restart()

    run("asyncio", main())


# They compute, except while the failure is held: a worker that waits looks as if it hung.
FAILS_AT_ONCE = """
if rank == 1 and not os.path.exists("again"):
    raise ValueError("no data left")
say("start", rank)
while not os.path.exists("end"):
    if os.path.exists("held") and not os.path.exists("again"):
        time.sleep(0.01)
"""


@pytest.mark.parametrize("hang_timeout_s", [0, pytest.param(1, marks=pytest.mark.all)])
def test_a_failure_is_held_for_somebody_to_look(launch: Launcher, hang_timeout_s: int) -> None:
    options = [f"--hang-timeout={hang_timeout_s}"] if hang_timeout_s else []
    job = launch(FAILS_AT_ONCE, "--nproc-per-node", "3", "--on-failure", "hold", *options, wrapper=PATIENT)
    wait_for("it is held", lambda: verb(job.folder, "status").out.partition("  ")[2].startswith("held"))
    (job.folder / "held").touch()
    if hang_timeout_s:
        since = (job.folder / "held").stat().st_mtime
        wait_for("they would be found to hang", lambda: time.time() - since > 3.0 * hang_timeout_s)
    assert "no data left" in verb(job.folder, "status").out
    assert verb(job.folder, "why").out.startswith("rank 1 failed on ") and "; held: " in verb(job.folder, "why").out
    assert job.stderr.count("; held: nothing is stopped until aelastic restart or stop") == 1
    assert "--- rank 2" in verb(job.folder, "stacks").out
    assert len(job.wait_line("start", 2)) == 2
    assert verb(job.folder, "restart").code == 0
    wait_for("it is held again", lambda: job.stderr.count("; held: nothing is stopped") == 2)
    job.wait_line("start", 4)
    (job.folder / "again").touch()
    assert verb(job.folder, "restart").code == 0
    job.wait_line("start", 7)
    assert "ValueError: no data left" in verb(job.folder, "why").out
    assert verb(job.folder, "stop").code == 0
    job.assert_ends(-signal.SIGTERM)


def test_a_failure_is_held_for_some_time(launch: Launcher) -> None:
    job = launch(FAILS_AT_ONCE, "--nproc-per-node", "2", "--on-failure", "hold:0.5")
    assert job.wait() == 1 and "restart or stop, or 0.5 s have passed" in job.stderr
    assert "ValueError: no data left" in job.stderr[job.stderr.index("Root Cause") :]
