"""`aelastic policy explain` and `why LOGS`: which node's record shows how a round ended, and how far it got."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.verbs import verb

from aelastic.base.host import control_sockets
from aelastic.cli.spent import run_spent
from aelastic.cli.verbs.explaining import read_ends, run_policy


def write(folder: Path, node: str, *records: dict[str, Any]) -> None:
    usual = {"schema": 1, "run_id": "job", "node": node, "host": node}
    (folder / node).mkdir()
    lines = [
        {"time": f"2026-11-27T10:00:{at:02}+00:00", "monotonic_ns": at * 10**9, **usual, **each}
        for at, each in enumerate(records)
    ]
    (folder / node / "events.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in lines))


def of(round_: int, generation: int, event: str, **fields: Any) -> dict[str, Any]:
    return {"event": event, "round": round_, "generation": generation, **fields}


def test_a_node_that_has_left_the_rounds_does_not_report_how_its_last_one_ended(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = {"event": "run_began", "max_restarts": 3}
    write(
        tmp_path, "n0", began,
        of(1, 1, "workers_started"), of(1, 1, "restarting", reason="rank 1 failed on n1; restart 1 of 3"),
        of(2, 2, "workers_started"), of(2, 2, "job_ended", reason="every worker succeeded"),
    )  # fmt: skip
    write(
        tmp_path, "n1", began,
        of(1, 1, "workers_started"), of(1, 1, "restarting", reason="rank 1 failed on n1; restart 1 of 3"),
        *[{"event": "waited"}] * 20,
        of(1, 1, "job_ended", reason="every worker succeeded"), of(1, 1, "run_ended", reason="every worker succeeded"),
    )  # fmt: skip
    for order in (("n0", "n1"), ("n1", "n0")):
        assert run_policy(["explain", *(str(tmp_path / name) for name in order), "--json"]) == 0
        rounds = json.loads(capsys.readouterr().out)["rounds"]
        assert [(each["round"], each["after_s"], each["decided"]) for each in rounds] == [
            (1, 1.0, "rank 1 failed on n1; restart 1 of 3"), (2, 1.0, "every worker succeeded"),
        ]  # fmt: skip
    assert [each["reason"] for each in read_ends(tmp_path)] == [each["decided"] for each in reversed(rounds)]
    monkeypatch.setattr(sys, "stdout", None)  # as `>&-` leaves it
    assert run_policy(["explain", str(tmp_path)]) == 0


def test_the_last_step_of_a_generation_is_its_own_though_the_next_round_has_formed(tmp_path: Path) -> None:
    write(
        tmp_path, "n0", {"event": "run_began", "max_restarts": 3},
        of(4, 1, "workers_started"), of(4, 1, "progressed", step=9),
        of(4, 1, "restarting", reason="rank 1 failed on n0; restart 1 of 3"),
        of(5, 1, "progressed", step=15, is_last=True),
        of(5, 2, "workers_started"), of(5, 2, "progressed", step=12), of(5, 2, "run_ended", reason="stopped"),
    )  # fmt: skip
    assert [(each["generation"], each["step"]) for each in read_ends(tmp_path)] == [(2, 12), (1, 15)]
    last, both = verb(tmp_path, "why", "n0").out, verb(tmp_path, "why", "n0", "-n", "2").out
    assert last.splitlines()[-1] == "1 earlier end not shown: add -n 2" and "not shown" not in both
    assert both.startswith(last.rpartition("\n1 earlier")[0])
    earlier = [json.loads(verb(tmp_path, "why", "n0", "--json", "-n", n).out)["earlier"] for n in "12"]
    assert earlier == [1, 0]


def test_a_round_that_continued_in_place_is_reported_as_by_a_living_agent(tmp_path: Path) -> None:
    reason = "rank 1 failed on n1; restart 1 of 3"
    began = {"event": "run_began", "max_restarts": 3}
    given = {"workers_kept": 1, "workers_replaced": 1, "step": 1140, "source_rank": 0, "duration_s": 0.06}
    write(
        tmp_path, "n0", began,
        of(1, 1, "workers_started"), of(1, 1, "progressed", step=9),
        of(1, 1, "restarting", reason=reason, in_place=True), of(2, 1, "workers_started"), of(2, 1, "recovered", **given),
        of(2, 1, "restarting", reason="rank 0 failed on n0; restart 2 of 3", in_place=True),
        of(2, 1, "not_recovered", reason="no state"), of(3, 2, "workers_started"), of(3, 2, "run_ended", reason="stopped"),
    )  # fmt: skip
    last, second, first = read_ends(tmp_path)
    assert [each["in_place"] for each in (first, second, last)] == [True, False, False]
    assert (first["round"], first["step"], first["recovered"]["workers_kept"]) == (1, 1140, 1)
    shown = verb(tmp_path, "why", "-n", "3", "n0").out
    assert "round 1 ended" in shown and "generation 1 ended" in shown and "generation 2 ended" in shown
    assert "round 2 continues in place: 1 of 2 workers kept, state of step 1140 from rank 0, 60 ms" in shown


@pytest.mark.parametrize(
    "damaged",
    [
        of(1, 1, "worker_ended", rank="x", failure={"rank": 0}),
        of(1, 1, "worker_ended", rank=0, failure={"rank": 0, "message": [1]}),
        of(1, 1, "worker_ended", rank=0, failure={"rank": 0}),
        of(1, 1, "worker_ended", failure=7),
        of(1, 1, "progressed", step=float("inf")),
        of(1, 1, "progressed", step=3, steps_per_s=[[1]]),
        of(1, 1, "restarting"),
        of(1, 1, "restarting", reason={}),
        of(2, 1, "recovered", step="x"),
        {**of(1, 1, "workers_started"), "round": []},
        {**of(1, 1, "workers_started", workers=[3]), "generation": {}},
        {"event": "run_began", "max_restarts": "many"},
        {"event": "waited", "round": 1, "time": "9999-12-31T23:59:59+00:00", "node": "n9"},
    ],
)
def test_a_damaged_record_changes_nothing_but_itself(tmp_path: Path, capsys: Any, damaged: dict[str, Any]) -> None:
    write(
        tmp_path, "n0", {"event": "run_began", "max_restarts": 3}, damaged,
        of(1, 1, "workers_started"), of(1, 1, "restarting", reason="rank 1 failed on n1; restart 1 of 3"),
    )  # fmt: skip
    assert run_policy(["explain", str(tmp_path), "--json"]) == 0
    assert [each["decided"] for each in json.loads(capsys.readouterr().out)["rounds"]] == [
        "rank 1 failed on n1; restart 1 of 3"
    ]
    assert len(read_ends(tmp_path)) == 1
    assert run_spent([str(tmp_path)]) == 0


def test_what_another_version_has_left_is_passed_over(tmp_path: Path) -> None:
    folder = control_sockets.folder_of({"XDG_RUNTIME_DIR": str(tmp_path)})
    control_sockets.listen_at(folder, "n").close()
    run = {"run_id": "job", "node_id": "n", "host": "h"}
    others: list[dict[str, Any]] = [
        {"run": run, "state": "FAILED", "why": [{"reason": "r"}]}, {"run": [3]}, {}, {"run": run, "why": []},
    ]  # fmt: skip
    for left in others:
        control_sockets.close(folder, "n", left)
        output = verb(tmp_path, "why")
        assert (output.code, output.err) == (3, "aelastic: no job of yours runs on this machine"), output
    (folder / "n.ended").write_bytes(b'{"run":')
    assert verb(tmp_path, "why").code == 3


def test_the_step_of_an_end_is_the_last_that_was_reported_though_an_epoch_before_went_further(tmp_path: Path) -> None:
    for name, step in (("n0", 7), ("n1", 8)):
        write(
            tmp_path, name, {"event": "run_began", "max_restarts": 0},
            of(1, 1, "workers_started"), of(1, 1, "progressed", step=900), of(1, 1, "progressed", step=step),
            of(1, 1, "run_ended", reason="stopped"),
        )  # fmt: skip
    assert [each["step"] for each in read_ends(tmp_path)] == [8]
