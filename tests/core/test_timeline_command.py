"""`python -m aelastic.timeline`: which logs it finds, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from kit import decided
from kit.numbered import restored
from kit.stories.event_logs import NodeLog, a_crash, a_start
from kit.stories.timelines import data_of

from aelastic.cli.timeline import main
from aelastic.observe.run_events import RunEnded
from aelastic.rdzv.decisions import wording
from aelastic.workers.states import Phase, WorkerState


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Logs of two nodes, as two machines leave them on a shared file system."""
    for node in a_crash():
        node.write(tmp_path / "logs" / node.host / "job_1a2b")
        (tmp_path / "logs" / node.host / "latest").symlink_to("job_1a2b")
    return tmp_path / "logs"


def test_the_picture_and_the_trace_of_all_nodes_lie_in_the_folder(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(folder)]) == 0

    picture, trace = folder / "timeline.html", folder / "timeline.trace.json"
    assert {"node-a", "node-b"} <= {
        event["args"].get("name") for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "M"
    }
    assert [node["name"] for node in data_of(picture.read_text())["nodes"]] == ["node-a", "node-b"]
    output = capsys.readouterr().out.splitlines()
    assert output == [
        f"picture  {picture}",
        f"trace    {trace}  (for https://ui.perfetto.dev)",
        "run      job: 20.2 s: trained 92.1 %, starting 7.4 %, waiting 0.50 %, 1 restart (300 ms until workers ran)",
    ]


def test_outputs_go_where_they_are_asked_to(folder: Path, tmp_path: Path) -> None:
    assert main([str(folder / "node-a"), str(folder / "node-b"), "-o", str(tmp_path / "a.html")]) == 0
    assert main([str(folder), "-o", str(tmp_path / "b.html"), "--trace", str(tmp_path / "c.json")]) == 0

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.html", "a.trace.json", "b.html", "c.json", "logs"]
    assert (tmp_path / "a.html").read_text() == (tmp_path / "b.html").read_text()


def test_a_link_or_a_log_itself_will_do(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = str(tmp_path / "x.html")
    for place in (folder / "node-a" / "latest", folder / "node-a" / "job_1a2b" / "events.jsonl"):
        assert main([str(place), "-o", output]) == 0
    # The same log by two paths is one log.
    assert main([str(folder), str(folder / "node-a" / "latest"), "-o", output]) == 0

    assert "node-a · 77" not in Path(output).read_text()


def test_of_several_runs_the_last_is_drawn_unless_another_is_chosen(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    NodeLog("node-a", begins=50_000.0, run_id="later").write(folder / "later_3c4d")

    assert main([str(folder)]) == 0
    output = capsys.readouterr().out
    assert "run      later: " in output and "1 other runs found; use --run-id to choose one: job" in output
    assert main([str(folder), "--run-id", "job"]) == 0
    assert "run      job: 20.2 s: trained 92.1 %" in capsys.readouterr().out


def test_a_log_whose_agent_is_gone_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    NodeLog(socket.gethostname(), pid=2**22 + 1).write(tmp_path / "a")  # above the kernel's maximum
    # Another process now has this pid: it began long after the log.
    NodeLog(socket.gethostname(), pid=os.getpid()).write(tmp_path / "b")

    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": cut off; ") == 2


def test_a_log_whose_agent_lives_continues_until_now(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = NodeLog(socket.gethostname(), pid=os.getpid())
    # This process's own log must not be older than the process; one from an hour from now is not.
    agent.lines = [line.replace(b'"2026-', b'"2096-') for line in agent.lines]
    agent.write(tmp_path)

    assert main([str(tmp_path)]) == 0
    assert "still running; " in capsys.readouterr().out


def a_failure(*, then: Phase) -> NodeLog:
    node = a_start()
    node.fails(2.0, 1, "RuntimeError: loss is NaN", known_at=2.01)
    node.stopped(2.1, 0, then=then)
    return node


def test_the_end_of_a_failed_run_is_reported_with_the_worker_that_failed_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = a_failure(then=Phase.DONE)
    spent = decided.refused(3, decided.failed(1, "node-a"))
    node.add(2.2, RunEnded(WorkerState.FAILED, wording.text_of(spent), decision=spent))
    page = node.write(tmp_path).with_name("timeline.html")

    assert main([str(tmp_path)]) == 0
    output = restored(capsys.readouterr().out).splitlines()
    changed = "(to restart anyway: a larger --max-restarts, or a rule with its own budget)"
    assert output[-2:] == [
        f"ended    FAILED: rank 1 failed on node-a; all 3 restarts are used up {changed}",
        "cause    rank 1 on node-a: RuntimeError: loss is NaN",
    ]
    assert (
        "all 3 restarts are used up (to restart anyway: a larger --max-restarts, or a rule with its own budget)</p>"
        in restored(page.read_text())
    )
    assert "rank 1 on node-a: RuntimeError: loss is NaN</p>" in restored(page.read_text())


def test_of_a_run_that_ended_for_want_of_nodes_no_worker_is_the_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = a_failure(then=Phase.AWAITING)
    node.restarting(2.2, decided.restart(1, 3, decided.failed(1, "node-a")))
    node.add(9.0, RunEnded(WorkerState.FAILED, "too few nodes came"))
    node.write(tmp_path)

    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "ended    FAILED: too few nodes came\n" in out and "cause" not in out


def test_a_run_that_was_killed_at_its_start_has_no_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a_start().write(tmp_path)

    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "run      job: training: unknown, the log ends at 23 ms, when the workers had just started\n" in out


def test_a_damaged_log_is_drawn_as_far_as_it_can_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = folder / "node-b" / "job_1a2b" / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join([*lines[:4], b"x" * 5_000_000 + b"\n", b"\x00\n", *lines[4:-1], lines[-1][:30]]))

    assert main([str(folder)]) == 0
    output = capsys.readouterr().out
    assert f"note     2 damaged lines left out ({log})." in output
    assert "note     node-b: still running or cut off; " in output


# Refused arguments, given a folder with all of this.
REFUSED = {
    "nowhere": "nowhere: no such file or folder",
    "\x1b[31mred": "red: no such file or folder",
    "fifos/events.jsonl": "is neither a folder nor an event log",
    "": "no LOGDIR given: name the --log-dir that the job ran with",
    "logs --bogus": "unknown option --bogus",
    "logs --outptu x": "unknown option --outptu: did you mean --output?",
    "fifos": "fifos: no event log here (events.jsonl, up to 3 folders deep)",
    "empty": "no record of a run (0 damaged lines)",
    "damaged": "no record of a run (2 damaged lines)",
    "newer": "/newer/events.jsonl: schema version 2; this aelastic reads version 1",
    "logs --run-id jab": "no such run here; found: ",
    "logs -o empty": "empty cannot be written: Is a directory",
    "logs --trace empty": "empty cannot be written: Is a directory",
    "logs -o no/x": "cannot be written: No such file or directory",
    "logs --trace no/x": "cannot be written: No such file or directory",
    "logs -o logs/node-a/latest/events.jsonl": "is an event log",
    "logs -o x --trace x": "need two files",
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_is_refused_is_reported_in_one_line(
    folder: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    a_crash()[0].write(Path("fifos/1/2/3/4"))  # too deep
    os.mkfifo("fifos/events.jsonl")  # reading it would never end
    newer = b"".join(a_crash()[0].lines).replace(b'"schema": 1', b'"schema": 2')
    for name, data in (("empty", b""), ("damaged", b"\x7fELF\n\n{}\n"), ("newer", newer)):
        Path(name).mkdir()
        Path(name, "events.jsonl").write_bytes(data)
    before = [path.read_bytes() for path in folder.glob("*/*/events.jsonl")]

    assert main(command.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "\x1b" not in err
    assert err.startswith("aelastic.timeline: error: ") and err.endswith(" (see python -m aelastic.timeline --help)\n")
    assert REFUSED[command] in err
    assert [path.read_bytes() for path in folder.glob("*/*/events.jsonl")] == before
    if "--trace" not in command:  # otherwise the picture is written first
        assert not Path("x").exists() and not Path("logs/timeline.html").exists()


def test_what_a_log_says_tells_a_terminal_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    NodeLog("a", run_id="\x1b]0;evil\x07\nrun").write(tmp_path)
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x07" not in out and len(out.splitlines()) == 4
