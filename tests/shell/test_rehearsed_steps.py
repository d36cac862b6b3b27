"""Steps at which a rehearsal disturbs a script, given the saves of the undisturbed run; which files are logs; invalid
commands and undisturbed runs."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

from aelastic.cli import rehearsal
from aelastic.cli.rehearsal import rehearse
from aelastic.errors import InputError
from aelastic.tools.rehearse import command
from aelastic.tools.rehearse.cases import CannotError, Rehearsals
from aelastic.tools.rehearse.command import Wanted, run_rehearsal
from aelastic.tools.rehearse.files import Change, Files, Stamp, by_kind, changes, overwritten
from aelastic.tools.rehearse.judging import CaseVerdict, Undisturbed
from aelastic.tools.rehearse.noted import Habit, Noted
from aelastic.tools.rehearse.trial import Script, Trial, Worker
from aelastic.training.rehearsed import notes


@pytest.mark.parametrize(
    "saves, middle, second",
    [
        ({"0.pt": [9, 19, 29, 39, 49, 59, 69, 79, 89, 99]}, 40, 19),  # every tenth step
        ({"0.pt": [9, 10, 19, 20, 39, 40, 59, 60]}, 41, 19),  # seen over two steps
        ({"0.pt": [*range(100)]}, 34, 2),  # every step
        ({"0.pt": [70]}, 71, 70),
        ({"0.pt": [9, 10]}, 34, 9),
        ({"0.png": [*range(4, 99, 5)], "0.pt": [44, 89], "end.pt": [99]}, 45, 89),  # samples come more often
    ],
)
def test_a_fault_comes_just_after_a_save_and_the_second_save_is_caught(
    saves: dict[str, list[int]], middle: int, second: int
) -> None:
    usual = Undisturbed(0, 99, True, 0.1, 1.0, 1, saves, {})
    assert (usual.middle, usual.second_save) == (middle, second)


@pytest.mark.parametrize("saves", [{}, {"end.pt": [99]}])
def test_without_checkpoints_a_fault_comes_after_a_third(saves: dict[str, list[int]]) -> None:
    usual = Undisturbed(0, 99, True, 0.1, 1.0, 1, saves, {})
    assert usual.middle == 34 and usual.saved_by is None and not usual.checkpoints


LOG, STATE = Path("log"), Path("state.pt")


def test_a_file_that_only_grows_while_steps_continue_is_a_log() -> None:
    grows = [Change(step, LOG, step > 0) for step in range(0, 100, 10)]
    assert by_kind(grows, 100, 100) == {}
    assert by_kind(grows, 1000, 100) == {"log": [*range(0, 100, 10)]}  # that may be a single slow save
    files = [Change(step, Path(f"{step}.pt"), grew=False) for step in range(0, 100, 10)]
    assert by_kind(files, 100, 100) == {"0.pt": [*range(0, 100, 10)]}
    anew = [each._replace(grew=False) for each in grows]
    assert by_kind(anew, 100, 100) == {"log": [*range(0, 100, 10)]}  # rewritten each time


def test_what_is_written_at_each_step_is_not_a_checkpoint_where_others_are_written_now_and_then() -> None:
    each = [Change(step, Path("status.json"), grew=False) for step in range(100)]
    saves = [Change(step, Path(f"{step}.pt"), grew=False) for step in (33, 66)]
    assert by_kind([*each, *saves], 100, 100) == {"0.pt": [33, 66]}
    assert by_kind(each, 100, 100) == {"status.json": [*range(100)]}


def test_a_file_grows_only_if_it_is_the_same_file() -> None:
    before: dict[Path, Stamp | None] = {STATE: Stamp(1, 10, 7, b""), LOG: Stamp(1, 10, 8, b""), Path("folder"): None}
    now: dict[Path, Stamp | None] = {
        **before,
        STATE: Stamp(2, 20, 9, b""),
        LOG: Stamp(2, 20, 8, b""),
        Path("new"): Stamp(2, 1, 1, b""),
    }
    assert changes(before, now, 5) == [
        Change(5, STATE, grew=False), Change(5, LOG, grew=True), Change(5, Path("new"), grew=False),
    ]  # fmt: skip
    assert overwritten(before, now) == ["state.pt"]


def test_a_file_grows_only_if_it_begins_as_it_was(tmp_path: Path) -> None:
    files = Files(tmp_path, tmp_path / "apart")
    for name in "log", "state":
        (tmp_path / name).write_text("losses: 1]")
    before = files.stamps()
    with (tmp_path / "log").open("a") as log:
        log.write("losses: 2]")
    (tmp_path / "state").write_text("losses: 1, 2]")
    assert {each.path.name: each.grew for each in changes(before, files.stamps())} == {"log": True, "state": False}


# Invalid commands.
WRONG = {
    ("--metric", "["): "'[' is not a regular expression",
    ("--metric", "x"): "'x' has no group for the number",
    ("--for", "0"): "'0': use seconds, at least 1",
    ("--checkpoints", "full"): "--checkpoints full is not empty",
    ("--output", "full"): "--output full already exists: name a new folder",
    ("--only", "kiled"): "--only kiled: no case name contains it; there are: a rank killed",
    ("--output", "old"): "name an empty folder that the script saves to with --checkpoints DIR",
    ("--output", "none/out"): "--output none/out: folder ",
    ("--checkpoints", "train.py"): "--checkpoints train.py is not a folder",
    # In any order with the job's options.
    ("--nproc-per-node", "2", "--metric", "["): "--metric [: '[' is not a regular expression",
    (
        "--nproc-per-node=2",
        "--only=kiled",
        "--max-restarts",
        "1",
    ): "--only kiled: no case name contains it; there are: a rank",
    ("--nproc-per-node", "0", "--only", "killed"): "--nproc-per-node 0: at least 1 worker is needed",
    ("--standalone", "--checkpoint", "d"): "unknown option --checkpoint: did you mean --checkpoints?",
    ("--checkpoint=d",): "unknown option --checkpoint: did you mean --checkpoints?",
    ("--chekpoints", "d"): "unknown option --chekpoints: did you mean --checkpoints?",
    ("--nprocs", "2", "--json"): "unknown option --nprocs: did you mean --nproc-per-node?",
}


@pytest.mark.parametrize("options", WRONG)
def test_what_is_wrong_with_a_command_is_reported_in_a_line(
    options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    for name in ("full/file", "train.py", *["old.pt"] * (options[-1] == "old")):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError) as caught:
        rehearse((*options, "--progress", r"step (\d+)", "train.py"), {})
    assert WRONG[options] in str(caught.value) and "\n" not in str(caught.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_options_of_a_rehearsal_and_of_its_job_come_in_any_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    asked = list[tuple[Script, Wanted]]()
    monkeypatch.setattr(rehearsal, "run_rehearsal", lambda *each: asked.append(each))
    job, own = (
        ["--nproc-per-node=2", "--standalone", "-r3", "--rdzv-conf=a=b,c=d"],
        ["--only", "killed", "--json", "--for=9"],
    )
    rest = ["train.py", "--only", "x", "--", "--json"]
    for options in (job + own, own + job, [*own[:2], *job, *own[2:]], [*own, *job, "--"]):
        rehearsal.rehearse([*options, *rest], {"PET_MAX_RESTARTS": "1"})
    assert [each == asked[0] for each in asked] == [True] * 4
    script, wanted = asked[0]
    assert script.options == ["--nproc-per-node=2", "--rdzv-conf=a=b,c=d", "--redirects=3"]
    assert script.command == ("train.py", "--only", "x", "--", "--json") and script.workers == 2
    assert wanted == (None, None, 9.0, "killed", None, True)


@pytest.mark.parametrize("marker", ["pyvenv.cfg", "lib/python3.11/site-packages/other", "conda-meta/history"])
def test_what_is_installed_in_the_folder_is_nothing_that_the_script_saves(tmp_path: Path, marker: str) -> None:
    installed = tmp_path / "venv/lib/python3.11/site-packages/distutils-precedence.pth"
    for path in (tmp_path / "venv" / marker, installed):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    files = Files(tmp_path, tmp_path / "apart")
    before = files.stamps()
    installed.write_text("import os")
    assert changes(before, files.stamps()) == []
    (tmp_path / "saved.pt").touch()
    with pytest.raises(InputError, match=r"has saved\.pt: name an empty folder"):
        Files(tmp_path, tmp_path / "apart")


# Output of an undisturbed run's workers, how it ended, and why it cannot be a reference.
STEP, LOSS = r"step (\d+)", r"loss (\S+)"
CANNOT: list[tuple[str, str, list[str], int | None, str]] = [
    (STEP, "", ["step 1"], 1, "the undisturbed run failed: rank 0 failed on n0: x"),
    (STEP, "", ["step 1", "again", "step 1"], 0, "the undisturbed run was restarted: rank 0 failed on n0: x"),
    ("", "", [], None, "the undisturbed run takes more than 9 s: raise --for, or add --progress"),
    (
        "",
        "",
        ["step 1"],
        0,
        "cannot tell the script's steps, as it neither commits steps nor calls notice.due(): add --progress, as in 'step (\\d+)'",
    ),
    (STEP, "", ["stop 1"], 0, "the script printed no step that matches 'step (\\d+)' (--progress)"),
    (
        STEP,
        "",
        [f"step {at}" for at in (0, 1, 2, 3, 0, 1)],
        0,
        "the script's steps go back from 3 to 0: let --progress match",
    ),
    (STEP, LOSS, ["step 1 loss 2.5,"], 0, "'2.5,' is not a number: let --metric match the number and nothing else"),
    (STEP, r"step 1( \d+)?", ["step 1"], 0, "the script printed no number that matches 'step 1( \\d+)?' (--metric)"),
    (
        STEP,
        "",
        ["step 1", "writes"],
        0,
        "the script changed train.py, which existed before: name the folder it saves to (--checkpoints)",
    ),
    (STEP, LOSS, ["step 1 loss 2", "step 3 loss 1", "step 5 loss 3"], 0, ""),
    (STEP, "", ["weights of step 7", *(f"step {at}" for at in range(5))], None, ""),
]


@pytest.mark.parametrize("step, metric, lines, code, why", CANNOT)
def test_an_undisturbed_run_that_nothing_can_be_compared_with_is_a_case_of_its_own(
    step: str, metric: str, lines: list[str], code: int | None, why: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text("print()")
    files = Files(tmp_path, tmp_path / "apart")
    files.apart.mkdir()
    script = Script((), ("train.py",), (1, 1), 1, re.compile(step) if step else None, {})
    pattern = re.compile(metric) if metric else None
    trial = Trial(script, files, pattern, files.apart / "1", 0)
    (trial.folder / "agent.log").write_text("aelastic: W that is all\n")
    events = trial.folder / "logs" / "latest" / "events.jsonl"
    events.parent.mkdir(parents=True)
    failure = {"rank": 0, "host": "n0", "message": "x\nand more"}
    records = [{"event": "worker_ended", "failure": failure}, {"event": "run_ended", "failure": None}]
    events.write_text("".join(f"{json.dumps(each)}\n" for each in records))
    worker = Worker(0, 1, 0, 7, tmp_path, -1)
    trial.workers.append(worker)
    for line in lines:
        if line == "again":
            worker = worker._replace(round=2)
            trial.workers.append(worker)
        if line == "writes":
            (tmp_path / "train.py").write_text("#")
            trial.stamps = files.stamps()
        trial._take(line, worker)
    with pytest.raises(CannotError, match=re.escape(why)) if why else nullcontext():
        Rehearsals(script, files, pattern, 9.0)._check(trial, code)


# How long a rehearsal takes, and what it prints when it is interrupted.


def test_it_is_estimated_how_long_the_cases_take(tmp_path: Path) -> None:
    script = Script((), ("train.py",), (1, 1), 2, re.compile(STEP), {})
    rehearsals = Rehearsals(script, Files(tmp_path, tmp_path / "apart"), None, 9.0)
    rehearsals.usual = Undisturbed(0, 99, True, 1.0, 2.0, 1, {}, {})
    one_s = rehearsals.takes_s(["a rank killed"])
    assert 65 < one_s < 100, "most of the 100 s, and two starts"
    assert rehearsals.takes_s(["a rank killed", "one worker more"]) == 2 * one_s
    assert rehearsals.takes_s(["a notice of 15 s"]) == one_s + 15, "it does not ask for notices"


@contextmanager
def keeping_signals() -> Iterator[None]:
    """Restores signal handlers: a rehearsal owns its process, and handles its signals."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


class Interrupted(Rehearsals):
    """Two cases are over when the user presses Ctrl-C."""

    def first(self) -> str:
        self.usual = Undisturbed(0, 99, True, 1.0, 2.0, 1, {}, {})
        return "100 steps in 100 s"

    def run(self, name: str) -> CaseVerdict:
        if name.startswith("killed while"):
            raise KeyboardInterrupt
        return CaseVerdict(True, "resumed", lost=3, resumed_at=30)


def test_a_rehearsal_shows_how_long_it_takes_and_shows_what_it_has_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "Rehearsals", Interrupted)
    monkeypatch.chdir(tmp_path)
    script = Script((), ("train.py",), (1, 1), 2, re.compile(STEP), {})
    with keeping_signals(), pytest.raises(KeyboardInterrupt):
        run_rehearsal(script, Wanted(None, None, 9.0, "", None, False))
    out, err = capsys.readouterr()
    first, _, left, *_ = out.splitlines()
    assert first == "9 runs of the script, most of them in part: about 6 times its own time, plus a few seconds each"
    assert re.fullmatch(r"   about \d+ min \d+ s to go", left)
    table = [line.split() for line in out.partition("passed ")[2].splitlines()[1:]]
    assert table == [
        ["a", "rank", "killed", "yes", "30", "3"],
        ["killed", "again", "within", "a", "step", "yes", "30", "3"],
    ]
    assert err.startswith("interrupted; logs and saved files: ")


class Habitual(Rehearsals):
    """Each case passes; the script calls a collective after its update, and reads its rank outside of the function."""

    def first(self) -> str:
        self.usual = Undisturbed(0, 99, True, 1.0, 2.0, 1, {}, {})
        noted = Noted()
        noted.take({"kind": notes.BEGAN, "in_place": True})
        self.in_place._usual = self.in_place._usual._replace(noted=noted)
        self.in_place.habits = {
            Habit(notes.READ_OUTSIDE, "train.py:3", "RANK"): None,
            Habit(notes.COLLECTIVE_AFTER_UPDATE, "train.py:9", "barrier"): None,
        }
        return "100 steps in 100 s"

    def run(self, name: str) -> CaseVerdict:
        return CaseVerdict(True, "recovered", lost=0, resumed_at=30)


class Plain(Interrupted):
    """The script does not opt in to recovery in place."""

    def first(self) -> str:
        self.cases = {name: case for name, case in self.cases.items() if name not in self.in_place.cases}
        return super().first()

    def run(self, name: str) -> CaseVerdict:
        return CaseVerdict(True, "resumed")


@pytest.mark.parametrize("workers, cases", [(1, 0), (2, 2), (3, 3)])
def test_ranks_are_killed_in_place_only_where_another_one_is_left(workers: int, cases: int, tmp_path: Path) -> None:
    script = Script((), ("train.py",), (1, 1), workers, None, {})
    rehearsals = Rehearsals(script, Files(tmp_path, tmp_path / "apart"), None, 9.0)
    noted = Noted()
    noted.take({"kind": notes.BEGAN, "in_place": True})
    rehearsals.in_place._usual = rehearsals.in_place._usual._replace(noted=noted)
    can = not rehearsals.in_place.why_not
    assert can == bool(cases)
    assert not can or len([name for name in rehearsals.cases if name.startswith("in place: ")]) == cases


def rehearsed(
    rehearsals: type[Rehearsals], folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_json: bool = False
) -> int:
    monkeypatch.setattr(command, "Rehearsals", rehearsals)
    monkeypatch.chdir(folder)
    script = Script((), ("train.py",), (1, 1), 3, re.compile(STEP), {})
    with keeping_signals():
        return run_rehearsal(script, Wanted(None, None, 9.0, "", None, is_json))


def test_a_case_has_its_result_under_the_old_name_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearsed(Habitual, tmp_path, monkeypatch, is_json=True) == 1
    cases = json.loads(capsys.readouterr().out)["rehearsals"]
    assert [(each["passed"], each["holds"]) for each in cases] == [(True, True)] * 12


def test_a_habit_that_breaks_recovery_in_place_fails_a_rehearsal_whose_cases_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearsed(Habitual, tmp_path, monkeypatch) == 1
    out = capsys.readouterr().out
    assert "in place: a second rank killed  ok   recovered\n" in out and "not rehearsed" not in out
    assert out.partition("all 11 passed\n")[2].splitlines()[:3] == [
        "rules of recovery in place that the script breaks:",
        (
            "  rule 3: train.py:9 calls barrier between optimizer.step() and the commit: "
            "call round.commit(step + 1) before it"
        ),
        (
            "  rule 5 (may do harm): train.py:3 reads RANK before the function is called: "
            "read it inside, as ranks may change"
        ),
    ]


def test_of_a_script_that_does_not_recover_in_place_one_line_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rehearsed(Plain, tmp_path, monkeypatch) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "in place" in line]
    assert lines == [
        "   recovery in place is not rehearsed: the script does not use @in_place, or --recovery restart turns it off"
    ]
