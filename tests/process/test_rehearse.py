"""Scripts with a planted fault, which a rehearsal finds, and correct ones, in which it finds none."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, ran
from kit.waiting import wait_for

from aelastic.base.host.proc_table import is_alive

# A training of 60 steps, in which ranks step together and fail with each other; rank 0 saves all state every 5 steps,
# in pieces, like a large file.
SCRIPT = """
import json, os, random, socket, sys, time
{begin}
LAST = {steps} - 1
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
os.makedirs("ck", exist_ok=True)
state = {{"step": 0, "weight": 1.0, "momentum": 0.0, "random": None}}
dice = random.Random(7)

def meet():
    place = "meet_" + "_".join(os.environ[name] for name in ("TORCHELASTIC_RUN_ID", "AELASTIC_ROUND", "MASTER_PORT"))
    if rank:
        while not os.path.exists(place):
            time.sleep(0.005)
        return [socket.create_connection(("127.0.0.1", int(open(place).read())))]
    with socket.create_server(("127.0.0.1", 0)) as server:
        open(place + ".part", "w").write(str(server.getsockname()[1]))
        os.replace(place + ".part", place)
        return [server.accept()[0] for _ in range(world - 1)]

def hear():
    if not all(peer.recv(1) for peer in peers):
        raise RuntimeError("connection closed by peer")

def together():
    if rank == 0:
        hear()
    for peer in peers:
        peer.sendall(b".")
    if rank:
        hear()

def write(name):
    state["random"] = dice.getstate()
    text = json.dumps(state)
    with open("ck/" + name, "w") as file:
        for at in range(0, len(text), 800):
            file.write(text[at : at + 800])
            file.flush()
            time.sleep(0.003)

def save():
    if rank == 0:
        {write}

names = sorted((each for each in os.listdir("ck") if each.endswith(".json")), key=lambda each: int(each.split(".")[0]))
{load}
peers = meet()
for step in range(state["step"], LAST + 1):
    time.sleep(0.02)
    together()
    {each}
    state["momentum"] = 0.9 * state["momentum"] + dice.random()
    state["weight"] -= 0.01 * state["momentum"]
    state["step"] = step + 1
    {early}
    {tell}
    {notice}
    if step % 5 == 4:
        save()
"""
LOAD = """
if names:
    state = json.load(open("ck/" + names[-1]))
    dice.setstate((state["random"][0], tuple(state["random"][1]), state["random"][2]))
"""
WRITE = 'write(f"{step}.part"); os.replace(f"ck/{step}.part", f"ck/{step}.json")'
IN_PLACE = 'write(f"{step}.json")'
NOTICE = "if notice.due(): save(); notice.saved()"
WITH = "from aelastic import notice"
TOLERANT = """
for name in names[-1:]:
    try:
        state = json.load(open("ck/" + name))
        dice.setstate((state["random"][0], tuple(state["random"][1]), state["random"][2]))
    except ValueError:
        pass
"""
PRINT = 'print("step", step, "loss", repr(state["weight"]), flush=True)'
LOGS = "os.makedirs('ck', exist_ok=True); own = open(f'ck/own_{os.getpid()}.log', 'w')"
HOLDS, AGAIN, NUMBERS, CRASH = "", "started over at step 0", "instead of", "it did not resume"
# For each script: replaced parts, the case that fails, and a part of its message.
PLANTED: dict[str, tuple[dict[str, str], str, str]] = {
    "it never resumes": ({"load": ""}, "killed again", AGAIN),
    "it says where it was saved, and begins again": (
        {"load": LOAD + "    print('weights of step', state['step'], flush=True)\n    state['step'] = 0\n"}, "rank killed", AGAIN,
    ),
    "it counts steps from 0": ({"load": LOAD + "    state['step'] = 0\n"}, "rank killed", AGAIN),
    "it counts from 0, with another number": ({"tell": PRINT.replace("step,", "step - start,"), "load": LOAD + "start = state['step']\n"}, "rank killed", AGAIN),
    "it writes in place": ({"write": IN_PLACE}, "while it saves", CRASH),
    "it writes in place, and forgives": ({"write": IN_PLACE, "load": TOLERANT}, "while it saves", AGAIN),
    "it forgets the random numbers": ({"load": LOAD.replace("dice.setstate", "str")}, "rank killed", NUMBERS),
    "it skips steps": ({"load": LOAD + "    state['step'] += 25\n"}, "rank killed", "were skipped"),
    "one rank asks for notices": ({"begin": WITH, "notice": f"if rank == 0 and {NOTICE[3:]}"}, "a notice of 15 s", "not all ranks had saved"),
    "it saves where it does not look": (
        {"begin": WITH, "notice": "if notice.due(): open('ck/lost', 'w').close(); notice.saved()"}, "a notice of 15 s", "lost",
    ),
    "it saves at its end alone": ({"write": f"if step == LAST: {WRITE}", "load": ""}, "rank killed", "it saves nothing before it ends"),
    "it never saves, and logs": (
        {"begin": LOGS, "each": "print(step, file=own, flush=True)", "write": "pass"}, "rank killed", "and it saves nothing",
    ),
    "it sorts names as text": ({"load": "names.sort()\n" + LOAD}, "rank killed", "though it had saved after step"),
    "it writes one file in place, and that grows": (
        {"write": "state.setdefault('told', []).extend([0.25] * 300); write('0.json')"}, "while it saves", CRASH,
    ),
    "it ends badly when it has resumed": ({"each": "if names and step == LAST: sys.exit(4)"}, "rank killed", "exited with code 4"),
    "it wants two workers": ({"begin": "assert os.environ['WORLD_SIZE'] == '2'"}, "one worker more", CRASH),
    "it breaks if it is paused": (
        {"begin": "import signal; signal.signal(signal.SIGCONT, lambda *_: sys.exit(5))"}, "frozen", "did not continue",
    ),
}  # fmt: skip
# Correct scripts, each with several features that don't hide each other.
RIGHT: dict[str, dict[str, str]] = {
    "that knows nothing of notices, and has logs of its own, one of them beside its checkpoints": {
        "begin": LOGS, "each": "print(step, file=own, flush=True); print(step, file=open('own.log', 'a'))",
    },
    "that saves at a notice and on each rank, and tells in a file how far it is": {
        "begin": WITH, "notice": NOTICE,
        "each": "open('ck/status.txt', 'w').write(str(step))\n    if step % 5 == 4: open(f'ck/{step}.rank{rank}', 'w').close()",
    },
    "whose numbers are never the same, and that tells steps on one rank": {
        "load": LOAD + "dice = random.Random()\n", "tell": f"if rank == 0: {PRINT}",
    },
    "whose number is a mean that begins anew": {
        "begin": "means = []",
        "load": LOAD + "    print('from step', state['step'] - 1, flush=True)\n",
        "tell": "means.append(state['weight'])\n    if step % 10 == 9: print('step', step, 'loss', sum(means) / len(means), flush=True); means = []",
    },
    "that tells each third step, and saves samples more often": {
        "tell": f"if step % 3 == 0: {PRINT}",
        "write": f"if step % 15 == 14: {WRITE}",
        "each": "if step % 5 == 2: open(f'ck/{step}.png', 'w').write('a')",
    },
    "that tells a step after a notice": {"begin": WITH, "early": NOTICE},
    "that saves at each step": {"each": "save()", "steps": "90"},
}  # fmt: skip


PROGRESS = ("--progress", r"step (\d+)")


def rehearse(
    folder: Path,
    parts: dict[str, str],
    job: tuple[str, ...] = ("--nproc-per-node", "2", *PROGRESS),
) -> tuple[int, dict[str, Any]]:
    usual = {
        "begin": "", "load": LOAD, "each": "pass", "write": WRITE, "notice": "", "early": "", "tell": PRINT,
        "steps": "90" if "notice" in parts else "60",
    }  # fmt: skip
    (folder / "train.py").write_text(SCRIPT.format(**{**usual, **parts}))
    command = [
        sys.executable, "-m", "aelastic", "rehearse", "--metric", r"loss (\S+)", "--checkpoints", "ck", "--output", "out", "--json",
        *job, "train.py",
    ]  # fmt: skip
    done = ran(*command, cwd=folder, timeout=5 * LAUNCH_TIMEOUT_S)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.timeout(300)
@pytest.mark.all
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, tmp_path: Path) -> None:
    parts, case, words = PLANTED[name]
    only = "killed" if case == "while it saves" else case  # next to the one between two saves
    code, result = rehearse(tmp_path, parts, ("--only", only, "--nproc-per-node", "2", *PROGRESS))
    assert code == 1 and result["code"] == "failed", result
    (found,) = [each for each in result["rehearsals"] if case in each["name"]]
    assert not found["passed"] and words in found["text"], result


@pytest.mark.timeout(300)
@pytest.mark.all
@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_found_in_a_script(name: str, tmp_path: Path) -> None:
    code, result = rehearse(tmp_path, RIGHT[name])
    assert code == 0 and len(result["rehearsals"]) == 9, result
    untested = [each["name"] for each in result["rehearsals"] if each["passed"] is None]
    assert all("notice" in each for each in untested), result  # the script does not ask for notices, and is short
    assert not (tmp_path / "ck").exists() or not any((tmp_path / "ck").iterdir())


# For each job: options, replaced parts of the script, the case that fails, and a part of its message.
TWO_NODES = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "elsewhere:29400", *PROGRESS)
ELASTIC = ("--nnodes", "1:3", *TWO_NODES[2:])
JOBS: dict[str, tuple[tuple[str, ...], dict[str, str], str, str]] = {
    "steps are calls, and it holds": (("--nproc-per-node", "2"), {"begin": WITH, "notice": NOTICE}, "", ""),
    "steps are calls, and it forgets the momentum": (
        ("--only", "rank killed", "--nproc-per-node", "2"),
        {"begin": WITH, "notice": NOTICE, "load": LOAD + "    state['momentum'] = 0.0\n"}, "rank killed", NUMBERS,
    ),
    "steps are calls, and its files have the world size": (
        ("--only", "one worker", "--nproc-per-node", "2"),
        {"begin": WITH, "notice": NOTICE, "load": "names = [each for each in names if world == 2]\n" + LOAD}, "one worker more", AGAIN,
    ),
    "two nodes hold": (TWO_NODES, {"begin": WITH, "notice": NOTICE}, "", ""),
    "two nodes, and no more": (("--only", "one node", *TWO_NODES), PLANTED["it wants two workers"][0], "one node more", CRASH),
    "one node has an endpoint": (("--only", "rank killed", "--nnodes", "1", *TWO_NODES[2:]), {}, "", ""),
    "a script goes on for long": (("--for", "3", "--only", "rank", "--nproc-per-node", "2", *PROGRESS), {"steps": "99999"}, "", ""),
    "nodes come and go": (("--only", "one node", *ELASTIC), {"begin": WITH, "notice": NOTICE, "each": "time.sleep(0.1)", "steps": "80"}, "", ""),
    "nodes come and go, and it never resumes": (("--only", "one node", *ELASTIC), {"load": "", "each": "time.sleep(0.1)", "steps": "80"}, "one node fewer", AGAIN),
}  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.all
@pytest.mark.parametrize("name", JOBS)
def test_a_job_is_rehearsed_where(name: str, tmp_path: Path) -> None:
    job, parts, case, words = JOBS[name]
    code, result = rehearse(tmp_path, parts, job)
    found = [each for each in result["rehearsals"] if each["passed"] is False]
    assert code == (1 if case else 0) and bool(found) == bool(case), result
    assert "each" not in parts or "before that" not in str(result), result
    assert not case or any(case in each["name"] and words in each["text"] for each in found), result


@pytest.mark.timeout(300)
@pytest.mark.all
@pytest.mark.long
def test_a_run_that_stands_still_is_reported_with_the_places_of_its_workers(tmp_path: Path) -> None:
    parts = {"each": "if names and step == 30: time.sleep(1000)"}
    job = ("--only", "rank killed", "--standalone", "--nproc-per-node", "2", *PROGRESS)
    code, result = rehearse(tmp_path, parts, job)
    assert code == 1 and "its workers are stuck, see stacks.txt" in result["rehearsals"][1]["text"], result
    assert f'File "{tmp_path}/train.py"' in (tmp_path / "out/02/stacks.txt").read_text()


@pytest.mark.timeout(300)
@pytest.mark.all
def test_nodes_share_the_gpus_and_there_is_no_node_more_than_they_do_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    begin = "assert os.environ['CUDA_VISIBLE_DEVICES'] in ('4', '7'); print(os.environ['CUDA_VISIBLE_DEVICES'], 'seen')"
    code, result = rehearse(tmp_path, {"begin": begin}, ("--only", "one", *TWO_NODES))
    more, fewer = result["rehearsals"][1:]
    assert code == 0 and more["passed"] is None and more["text"] == "this host has 2 GPUs" and fewer["passed"], result
    seen = {path.read_text().split()[0] for path in tmp_path.glob("out/01/logs*/latest/attempt_0/0/stdout.log")}
    assert seen == {"4", "7"}


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.all), signal.SIGTERM, signal.SIGKILL])
def test_a_rehearsal_that_is_interrupted_leaves_nothing_running(signum: int, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import time\nopen('left', 'w').close()\nfor step in range(9999):\n    print('step', step, flush=True)\n    time.sleep(0.1)\n"
    )
    options = ["--output", "out", "--progress", r"step (\d+)", "train.py"]
    command = [sys.executable, "-m", "aelastic", "rehearse", *options]
    with subprocess.Popen(command, cwd=tmp_path, text=True, stderr=subprocess.PIPE) as rehearsal:
        wait_for(
            "it steps",
            lambda: [each for each in tmp_path.glob("out/01/logs/latest/attempt_0/0/stdout.log") if each.read_text()],
        )
        log = tmp_path / "out/01/logs/latest/events.jsonl"  # written in the background, so it may lag
        wait_for("its workers are told", lambda: log.exists() and started(log))
        pids = [each["id"] for each in started(log)]
        rehearsal.send_signal(signum)
        assert rehearsal.wait(LAUNCH_TIMEOUT_S) == (-signum if signum == signal.SIGKILL else 130)
        stderr = rehearsal.stderr.read() if rehearsal.stderr else ""
    if signum != signal.SIGKILL:
        assert stderr == f"interrupted; logs and saved files: {tmp_path}/out\n"
        assert (tmp_path / "out/01/files/left").exists() and not (tmp_path / "left").exists()
    if signum == signal.SIGKILL:  # its agent ends with it, and then the workers
        wait_for("no worker lives", lambda: not [pid for pid in pids if is_alive(pid)])
    assert not [pid for pid in pids if is_alive(pid)]


def started(log: Path) -> list[dict[str, Any]]:
    whole = [line for line in log.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [each for line in whole for each in json.loads(line).get("workers", ())]


CANNOT = [
    ("raise ValueError('x')", PROGRESS, "the undisturbed run failed: rank 0 failed on "),
    pytest.param("", (), "it neither commits steps nor calls notice.due(): add --progress", marks=pytest.mark.all),
    pytest.param(
        "for step in range(3): print('step', step)", ("--only", "notice", *PROGRESS), "nothing could be tested", marks=pytest.mark.all,
    ),
]  # fmt: skip


@pytest.mark.parametrize("script, options, words", CANNOT)
def test_a_script_that_cannot_be_rehearsed_is_a_case_of_its_own(
    script: str, options: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    command = [sys.executable, "-m", "aelastic", "rehearse", "--json", *options, "train.py"]
    done = ran(*command, cwd=tmp_path)
    result = json.loads(done.stdout)
    assert done.returncode == 3 and result["code"] == "cannot" and words in result["text"]
