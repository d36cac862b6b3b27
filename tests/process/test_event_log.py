"""The event log: its content, and that it never harms a job."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit import decided
from kit.agents import FAIL, FINISH, c10d, team_of
from kit.backends import FAILS, STUBBORN, SUCCEEDS, FakeBackend, StoreStandIn
from kit.launching import Launcher
from kit.virtual_clock import on_virtual_time
from kit.waiting import DEADLINE_S, wait_for

import aelastic.observe.event_log
from aelastic import Std, Supervisor, WorkerSpec, WorkerState
from aelastic.errors import ProcessFailure
from aelastic.observe import run_events as ev
from aelastic.observe.event_log import EventLog, Json, Records, rfc3339
from aelastic.rdzv.decisions.cause import Cause, CauseKind, SaveOutcome
from aelastic.rdzv.decisions.decision import Decision, DecisionKind
from aelastic.rdzv.protocol import messages as m
from aelastic.workers.states import Phase

pytestmark = pytest.mark.usefixtures("warm_stores")

DOCS = Path(__file__).parents[2] / "docs" / "reference"
SCHEMA = json.loads((DOCS / "event-log.schema.json").read_text())
FRAME = set(SCHEMA["required"])

FAILURE = ProcessFailure.from_elsewhere("node1", 5, 1, 77, -11, "SIGSEGV", "", 1000)
BEGAN = ev.RunBegan("job", "node1-1-ab", "node1", 1, "default", "train.py", 2, 1, 4, 3, "c10d")
FORMED = ev.RoundFormed(7, 3, 2, 1, 2, 4, 2, 6)
SAMPLES: Sequence[ev.RunEvent] = (
    BEGAN,
    ev.Changed(Phase.INIT, Phase.JOINING, WorkerState.INIT, "the run begins"),
    ev.Waited("1 of 2 nodes"),
    FORMED,
    ev.PhaseTook("rendezvous", 0.25),
    ev.WorkersStarted(3, {1: "remote", 0: 4711}, frozenset({0})),
    ev.WorkerReached(3, 0, 4, "warm", "process_group", 0.05),
    ev.ForkServerMeasured(2, 1 << 27),
    ev.Noticed(3, 1, 5, "timer", "timer 'step' expired", True),
    ev.Progressed(3, 1, 5, 40, 1000, 2.5, 384.0),
    ev.StacksTaken(3, "asked", {0: "py-spy", 1: "nothing: it is gone"}, "/logs/stacks"),
    ev.WorkerEnded(3, 0, 4, "stopped"),
    ev.WorkerEnded(3, 1, 5, "failed", FAILURE),
    ev.PhaseTook("detect", 0.001, 1),
    ev.Killed(3, (0,), "not ended after 30 s"),
    ev.Restarting("failure", decided.restart(3, 3, decided.failed(5)), 3),
    ev.Recovered(4, 3, 1, 1, 1234, 0, 0.061),
    ev.NotRecovered(3, "no worker of this node has survived"),
    ev.EndpointChanged("node1:29400", "connection refused"),
    ev.StopAsked(15),
    ev.RendezvousLost("the store is gone"),
    ev.JobEnded(m.Outcome.FAILED, decided.refused(3, decided.failed(5)), FAILURE),
    ev.Compared(
        3, "hang: 3 of 4 ranks wait in all_reduce (train.py:120) for 62 s; rank 5 on n1 does not: sleeps", (5,)
    ),
    ev.Announced("saving", "drain of n1 within 110 s (spot)", 82),
    ev.RunEnded(
        WorkerState.FAILED, "rank 5 failed", FAILURE, {5: FAILURE}, "Traceback", decided.refused(3, decided.failed(5))
    ),
)


@pytest.fixture(autouse=True)
def _no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)


jsonschema = pytest.importorskip("jsonschema")  # in the group dev
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
# One validator per kind: trying every choice is slow if a log has many records.
OF_KIND = {
    choice["$ref"].rpartition("/")[2]: jsonschema.Draft202012Validator({**SCHEMA, "oneOf": [choice]})
    for choice in SCHEMA["oneOf"]
}


def records_of(path: Path) -> list[Json]:
    """The records of a log with whole lines only; each must match the schema."""
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    records = [json.loads(line) for line in lines]
    for record in records:
        OF_KIND[record["event"]].validate(record)
    return records


def log_of(folder: Path) -> Path:
    """The log of the only run in a log folder."""
    found = [path for path in folder.glob("*/events.jsonl") if path.parent.name != "latest"]
    assert len(found) == 1
    return found[0]


def events(records: Sequence[Json], *kinds: str) -> list[Json]:
    return [record for record in records if record["event"] in kinds]


def assert_whole(records: Sequence[Json]) -> None:
    """Checks that a log has a beginning and an end, and that each phase follows from the one before."""
    assert [record["event"] for record in (records[0], records[-1])] == ["run_began", "run_ended"]
    assert len(events(records, "run_began", "run_ended")) == 2
    assert len({(record["run_id"], record["node"], record["host"]) for record in records}) == 1
    assert all(before["monotonic_ns"] <= after["monotonic_ns"] for before, after in pairwise(records))
    changes = events(records, "changed")
    assert [change["phase"] for change in changes[:-1]] == [change["before"] for change in changes[1:]]
    assert all(change["reason"] for change in changes)
    later_rounds = len(events(records, "round_formed")) - 1
    assert later_rounds <= len(events(records, "restarting")) <= later_rounds + (records[-1]["state"] != "SUCCEEDED")


# Content.


def test_every_run_event_is_a_record_of_the_schema() -> None:
    assert {type(event) for event in SAMPLES} == set(ev.RunEvent.__subclasses__())
    made = Records()
    records = [made.record(event, rfc3339(0), 1.5) for event in SAMPLES]
    records.append(made.lost(3, "no space left", rfc3339(0), 1.5))
    records.append(made.alive(rfc3339(0), 1.5))
    for record in records:
        VALIDATOR.validate(json.loads(json.dumps(record)))
    assert {record["event"] for record in records} == OF_KIND.keys()


@pytest.mark.parametrize("event", SAMPLES, ids=lambda event: type(event).__name__)
def test_the_schema_refuses_a_record_with_a_field_too_many_or_too_few(event: ev.RunEvent) -> None:
    record = json.loads(json.dumps(Records().record(event, rfc3339(0), 1.5)))
    assert VALIDATOR.is_valid(record) and not VALIDATOR.is_valid({**record, "more": 1})
    optional = {"stimulus"}  # logs of versions before 0.2 lack it
    optional |= {"rank", "local_rank"} if isinstance(event, ev.PhaseTook) else set()
    for name in record.keys() - optional:
        assert not VALIDATOR.is_valid({key: value for key, value in record.items() if key != name}), name


def test_a_record_has_its_time_its_node_and_its_round() -> None:
    made = Records()
    first, formed, started, detected = (
        made.record(event, "t", 1.25) for event in (BEGAN, FORMED, SAMPLES[5], SAMPLES[12])
    )
    assert {name: first[name] for name in FRAME} == {
        "time": "t", "monotonic_ns": 1_250_000_000, "schema": 1, "event": "run_began", "run_id": "job",
        "node": "node1-1-ab", "host": "node1", "round": None, "generation": None,
    }  # fmt: skip
    assert (formed["round"], formed["generation"], formed["node"]) == (7, 3, "node1-1-ab")
    assert started["workers"] == [
        {"local_rank": 0, "rank": 4, "id": 4711, "kind": "warm"},
        {"local_rank": 1, "rank": 5, "id": "remote", "kind": "cold"},
    ]
    assert (detected["rank"], detected["local_rank"]) == (5, 1)


def test_the_time_of_day_has_microseconds_and_sorts_as_text() -> None:
    assert rfc3339(0) == "1970-01-01T00:00:00.000000Z"
    assert rfc3339(1_795_294_435_000_001_999) == "2026-11-21T20:53:55.000001Z"


def test_the_document_names_every_event_and_every_field() -> None:
    text = (DOCS / "event-log.md").read_text()
    names = set(FRAME)
    for name, definition in SCHEMA["$defs"].items():
        names |= {name, *definition["properties"]}
    names |= {*ev.PHASES, *(phase.value for phase in Phase), *(state.value for state in WorkerState)}
    assert not {name for name in names if f"`{name}`" not in text}


def test_the_schemas_lists_are_those_of_the_code() -> None:
    took, changed = SCHEMA["$defs"]["phase_took"]["properties"], SCHEMA["$defs"]["changed"]["properties"]
    assert took["name"]["enum"] == list(ev.PHASES)
    assert changed["phase"]["enum"] == changed["before"]["enum"] == [phase.value for phase in Phase]
    assert set(changed["state"]["enum"]) == {state.value for state in WorkerState}
    of_cause, of_decision = (SCHEMA["$defs"][name]["properties"] for name in ("cause", "decision"))
    assert of_cause["kind"]["enum"] == list(CauseKind) and of_cause["saved"]["enum"] == list(SaveOutcome)
    assert of_decision["kind"]["enum"] == list(DecisionKind)
    names = tuple(name for name, each in of_decision.items() if "deprecated" not in each)
    assert (*of_cause,) == Cause.__match_args__ and names == Decision.__match_args__


# Runs, on a virtual clock.


async def run(backend: FakeBackend, folder: Path, workers: int = 2, **more: Any) -> list[Json]:
    options: dict[str, Any] = {"entrypoint": "train.py", "max_restarts": 2, "log_dir": folder, **more}
    await Supervisor(WorkerSpec(local_world_size=workers, **options), backend=backend).run()
    return records_of(log_of(folder))


@on_virtual_time
async def test_a_crash_and_a_restart_are_reported_with_all_they_took(tmp_path: Path) -> None:
    records = await run(FakeBackend([FAILS, STUBBORN], [SUCCEEDS, SUCCEEDS], start_s=1), tmp_path)
    assert_whole(records)
    assert Counter(record["event"] for record in records) == {
        "run_began": 1, "changed": 9, "phase_took": 9, "round_formed": 2, "workers_started": 2, "worker_ended": 4,
        "killed": 1, "restarting": 1, "job_ended": 1, "run_ended": 1,
    }  # fmt: skip
    (failed,) = [record for record in records if record.get("failure")]
    assert (failed["rank"], failed["outcome"], failed["failure"]["exitcode"]) == (0, "failed", 3)
    took = [(record["name"], record["duration_s"]) for record in events(records, "phase_took")]
    assert ("stop", 30) in took
    assert ("run", 10) in took
    changes = events(records, "changed")
    passed_s = (changes[-1]["monotonic_ns"] - changes[0]["monotonic_ns"]) / 1e9
    assert sum(duration_s for name, duration_s in took if name != "detect") == pytest.approx(passed_s), "end to end"
    assert (records[-1]["state"], records[-1]["failure"]) == ("SUCCEEDED", None)
    assert list(dict.fromkeys(record["stimulus"] for record in records)) == ["start", "1-failure-0", "2-all_succeeded"]
    assert {record["generation"] for record in records} == {None, 1, 2}


# When the log exists.


@pytest.mark.parametrize(
    "asked, has_log",
    [({"redirects": Std.ERR}, True), ({"tee": Std.OUT}, True), ({}, False), ({"log_dir": Path("/dev/null")}, False)],
    ids=["redirects", "tee", "nothing", "/dev/null"],
)
def test_there_is_one_where_the_output_is_kept(
    asked: dict[str, Any], has_log: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(aelastic.observe, "event_log", aelastic.observe.event_log)  # restored after the test
    monkeypatch.delitem(sys.modules, "aelastic.observe.event_log")

    @on_virtual_time
    async def run_it() -> None:
        await Supervisor(WorkerSpec(entrypoint="train.py", **asked), backend=FakeBackend([SUCCEEDS])).run()

    run_it()
    assert bool(list(tmp_path.rglob("events.jsonl"))) is has_log
    assert ("aelastic.observe.event_log" in sys.modules) is has_log  # a job without a log does not pay for it


# Failing disks.


@asynccontextmanager
async def logging_to(path: Path, **options: Any) -> AsyncIterator[EventLog]:
    log = EventLog(path, **{"retry_interval_s": 0.02, **options})
    try:
        log.tell(BEGAN, 0.0)
        yield log
    finally:
        await log.aclose()


async def until(what: str, condition: Callable[[], Any]) -> None:
    await anyio.to_thread.run_sync(wait_for, what, condition)


def logged(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    records = [record for record in caplog.records if record.name == "aelastic.observe.event_log"]
    return [record.getMessage() for record in records if record.levelno == level]


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 64 KiB, on which the first file leaves only as much space as a test needs."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root may mount a small disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False, capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this machine mounts no tmpfs: {mounted.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def fill(path: Path) -> None:
    with path.open("wb") as file:
        while True:
            try:
                os.write(file.fileno(), bytes(4096))
            except OSError:
                return


def texts(records: Sequence[Json]) -> list[str]:
    return [record["text"] for record in events(records, "waited")]


def so_far(path: Path) -> list[Json]:
    """Content while the log is being written; on a full disk, this may briefly include a line that is then removed."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


async def test_on_a_full_disk_it_warns_once_and_continues_when_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "events.jsonl"
        async with logging_to(path) as log:
            log.tell(ev.Waited("0"), 0.0)
            await until("the first lines", lambda: len(texts(so_far(path))) == 1)
            fill(disk / "big")
            for number in range(1, 100):
                log.tell(ev.Waited(str(number)), 0.0)
            await until("a warning", lambda: logged(caplog))
            found = texts(so_far(path))
            assert found == [str(number) for number in range(len(found))]  # in order
            assert len(found) < 100
            (disk / "big").unlink()
            await until("all lines", lambda: len(texts(so_far(path))) == 100)
        assert texts(records_of(path)) == [str(number) for number in range(100)]
        assert logged(caplog) == [f"cannot write the event log {path} (No space left on device); the job continues"]


async def test_what_is_more_than_it_keeps_is_counted_where_it_is_missing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "aelastic.observe.event_log")
    with small_disk(tmp_path / "disk") as disk:
        path = disk / "events.jsonl"
        fill(disk / "big")
        async with logging_to(path, backlog_max=10) as log:
            for number in range(1, 20):
                log.tell(ev.Waited(str(number)), 0.0)
            await until("a warning", lambda: logged(caplog))
            (disk / "big").unlink()
            await until("what was kept", lambda: len(texts(so_far(path))) == 9)
            await until("room for more", lambda: log._writer.settled == 10)
            log.tell(ev.Waited("after"), 0.0)
        records = records_of(path)
        kept = ["run_began", *["waited"] * 9, "records_lost", "waited"]
        assert [record["event"] for record in records] == kept
        assert (records[-2]["count"], records[-2]["reason"]) == (10, "No space left on device")
        assert len(logged(caplog)) == 1
        assert logged(caplog, logging.INFO) == [f"the event log {path} is missing 10 records"]


async def test_a_disk_that_stays_full_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aelastic.observe.event_log")
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    async with logging_to(path) as log:
        for _ in range(4):
            log.tell(ev.Waited(""), 0.0)
    assert logged(caplog) == [f"cannot write the event log {path} (No space left on device); the job continues"]
    assert logged(caplog, logging.INFO) == [f"the event log {path} is missing 5 records"]


async def test_a_folder_that_is_removed_and_comes_back_has_a_log_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    path = folder / "events.jsonl"
    async with logging_to(path) as log:
        await until("a log", path.exists)
        path.unlink()
        folder.rmdir()
        log.tell(ev.Waited("0"), 0.0)
        await until("a warning", lambda: logged(caplog))
        log.tell(ev.Waited("1"), 0.0)
        folder.mkdir()
    assert texts(records_of(path)) == ["0", "1"]
    assert len(logged(caplog)) == 1


async def test_a_disk_that_hangs_does_not_hold_up_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aelastic.observe.event_log.FINISH_TIMEOUT_S", 0.1)
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)  # it has no reader, so a writer that opens it blocks
    try:
        async with logging_to(path, backlog_max=100) as log:
            for _ in range(5000):
                log.tell(ev.Waited(""), 0.0)
        assert logged(caplog) == [f"the event log {path} is missing 5001 records"]
    finally:
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        for thread in [thread for thread in threading.enumerate() if thread.name == "event log"]:
            while thread.is_alive():
                if not _drained(reader):
                    thread.join(0.01)
        os.close(reader)


def _drained(reader: int) -> bytes:
    try:
        return os.read(reader, 1 << 16)
    except BlockingIOError:
        return b""


async def test_where_nothing_happens_there_are_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_append, append = threading.Event(), aelastic.observe.event_log._append

    def append_when_allowed(path: Path, lines: bytes) -> int:  # otherwise a heartbeat may precede the second event
        may_append.wait(DEADLINE_S)
        return append(path, lines)

    monkeypatch.setattr("aelastic.observe.event_log._append", append_when_allowed)
    path = tmp_path / "events.jsonl"
    began = time.monotonic()
    async with logging_to(path, alive_interval_s=0.05) as log:
        log.tell(FORMED, 1000.0)  # the loop's clock may have any value
        may_append.set()
        await until("two signs", lambda: len(events(so_far(path), "alive")) >= 2)
    took_ns = (time.monotonic() - began) * 1e9
    records = records_of(path)
    assert [record["event"] for record in records[:4]] == ["run_began", "round_formed", "alive", "alive"]
    assert (records[3]["run_id"], records[3]["round"], records[3]["generation"]) == ("job", 7, 3)
    first, second = (records[place]["monotonic_ns"] - 1000 * 10**9 for place in (2, 3))
    assert 0.04e9 < first < second < took_ns
    assert records[1]["time"] < records[2]["time"] < records[3]["time"]


async def test_there_is_no_sign_of_life_while_something_is_unwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = list[bytes]()
    append = aelastic.observe.event_log._append

    def watched(path: Path, lines: bytes) -> int:
        tries.append(lines)
        return append(path, lines)

    monkeypatch.setattr("aelastic.observe.event_log._append", watched)
    folder = tmp_path / "run"
    async with logging_to(folder / "events.jsonl", alive_interval_s=0.001):
        await until("some tries", lambda: len(tries) > 4)
        folder.mkdir()
        await until("a sign", lambda: events(so_far(folder / "events.jsonl"), "alive"))
    assert all(lines.count(b"\n") == 1 for lines in tries)
    assert b"run_began" in tries[4] and b"alive" in tries[-1]


async def test_nothing_follows_the_end_of_a_run(tmp_path: Path) -> None:
    path, other = tmp_path / "events.jsonl", tmp_path / "other.jsonl"
    async with logging_to(path, alive_interval_s=0.01) as log:
        log.tell(SAMPLES[-1], 1.0)
        await until("the end", lambda: events(so_far(path), "run_ended"))
        async with logging_to(other, alive_interval_s=0.01):  # while another run keeps showing that it is alive
            await until("signs", lambda: len(events(so_far(other), "alive")) >= 3)
    assert records_of(path)[-1]["event"] == "run_ended"


async def test_an_observer_that_received_nothing_makes_no_file(tmp_path: Path) -> None:
    before = threading.enumerate()  # the thread of a previous log may be about to end
    log = EventLog(tmp_path / "events.jsonl")
    await log.aclose()
    assert not os.listdir(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name == "event log" and thread not in before]


async def test_hundreds_of_events_at_once_are_all_there(tmp_path: Path) -> None:
    async with logging_to(tmp_path / "events.jsonl") as log:
        for _ in range(300):
            log.tell(FORMED, 0.0)
    assert len(records_of(tmp_path / "events.jsonl")) == 300 + 1


async def test_what_a_worker_said_is_one_line_whatever_it_is(tmp_path: Path) -> None:
    strange = "two\nlines\u2028\x00 \udc80 ¥"
    async with logging_to(tmp_path / "events.jsonl") as log:
        log.tell(ev.Waited(strange), 0.0)
    assert texts(records_of(tmp_path / "events.jsonl")) == [strange]


# Real jobs.


def whole_lines(folder: Path) -> list[Json]:
    """What a reader sees in the meantime."""
    found = list(folder.glob("*_*/events.jsonl"))
    return so_far(found[0]) if found else []


def test_it_can_be_read_while_the_job_runs_and_is_whole_when_the_agent_is_killed(launch: Launcher) -> None:
    job = launch("say('pid', os.getpid()); signal.pause()", "--log-dir", "logs", "--max-restarts", "1")
    job.wait_line("pid")
    wait_for("a start", lambda: events(whole_lines(job.folder / "logs"), "workers_started"))
    (worker,) = events(whole_lines(job.folder / "logs"), "workers_started")[0]["workers"]
    os.kill(worker["id"], signal.SIGKILL)
    job.wait_line("pid", 2)
    again = wait_for("the other", lambda: events(whole_lines(job.folder / "logs"), "workers_started")[1:])
    job.signal(signal.SIGKILL)
    job.wait()
    records = records_of(log_of(job.folder / "logs"))
    (ended,) = events(records, "worker_ended")
    assert (ended["outcome"], ended["failure"]["exitcode"], ended["failure"]["pid"]) == ("failed", -9, worker["id"])
    assert (again[0]["generation"], records[-1]["generation"]) == (2, 2)
    assert not events(records, "run_ended")


def test_two_nodes_tell_one_story(launch: Launcher) -> None:
    options = ("--max-restarts", "3", "--log-dir", "logs")
    with team_of(launch, c10d(), "1:2", conf={"last_call_timeout": 0.1, "settle_time": 0.1}, options=options) as team:
        first = team.start()
        alone = team.wait_round([first])
        second = team.start()
        together = team.wait_round([first, second], after=alone)
        together.send_signal(FAIL, 1)
        again = team.wait_round([first, second], after=together)
        second.signal(signal.SIGTERM)
        last = team.wait_round([first], after=again)
        last.send_signal(FINISH)
        first.wait()
        second.wait()
    records_of_node = {agent: records_of(log_of(agent.folder / "logs")) for agent in (first, second)}
    for records in records_of_node.values():
        assert_whole(records)
    restarts = {
        agent: [each["cause"] for each in events(records, "restarting")] for agent, records in records_of_node.items()
    }
    assert restarts == {first: ["membership", "failure", "membership"], second: ["failure"]}
    (of_failure,) = [
        {each["stimulus"] for each in events(records, "restarting") if each["cause"] == "failure"}
        for records in records_of_node.values()
    ][:1]
    for records in records_of_node.values():
        begun = [each["round"] for each in events(records, "workers_started") if each["stimulus"] in of_failure]
        assert begun == [together.number % 1000 + 1], "both nodes name what set off the next round, and alike"
    failed = [
        record
        for agent in records_of_node
        for record in records_of_node[agent]
        if record["event"] == "worker_ended" and record["failure"]
    ]
    # The other worker may have failed because of the lost connection before it was stopped.
    causes = [(record["rank"], record["failure"]["message"]) for record in failed]
    assert [cause for cause in causes if cause != (0, "RuntimeError: rank 0: connection closed by peer")] == [
        (1, "exited with code 7")
    ]
    assert len({record["node"] for records in records_of_node.values() for record in records}) == 2
    assert [records_of_node[agent][-1]["state"] for agent in (first, second)] == ["SUCCEEDED", "STOPPED"]
