"""How commands about jobs print the answers of agents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aelastic.cli.verbs import texts
from aelastic.cli.verbs.jobs import Jobs, NoAnswerError

NAMED, GENERATED = "resnet", "717526a9-76ed-4f66-a4ac-042e634da802"


def agent(run_id: str = NAMED, **more: Any) -> dict[str, Any]:
    """A node of a job, as described by its agent."""
    run = {"run_id": run_id, "node_id": "n0", "host": "n0", "pid": 7, "began": "2026-01-02T09:00:00+00:00"}
    return {
        "code": "ok", "time": "2026-01-02T09:01:00+00:00", "run": {**run, "entrypoint": "train.py"}, "phase": "running",
        "since": "2026-01-02T09:00:30+00:00", "restarts": {"failure": 0}, "drains": 0, "spent": {}, "progress": None,
        "round": None, "workers": [], "announced": None, "waiting": None, "reason": "", "leads": False,
        "folder": f"/home/ada/{run_id[:6]}", **more,
    }  # fmt: skip


def test_a_status_shows_what_the_job_runs_and_where() -> None:
    shown = texts.status([agent(GENERATED)], (), {}, agent(GENERATED)).splitlines()
    assert shown[0].startswith(f"{GENERATED}  running  1 min ") and shown[1] == "train.py in /home/ada/717526"
    assert texts.program(agent(folder="")) == "train.py in a folder that is gone"


def test_a_status_counts_recoveries_in_place_where_there_were_any() -> None:
    heads = [texts.status([agent(recoveries=count)], (), {}, agent()).splitlines()[0] for count in (0, 1, 2)]
    heads.append(texts.status([agent(), agent(recoveries=2)], (), {}, agent()).splitlines()[0])  # an older version
    assert [head.partition("0 drains")[2] for head in heads] == [
        "", ", 1 recovery in place", ", 2 recoveries in place", ", 2 recoveries in place",
    ]  # fmt: skip


def test_a_status_explains_its_star() -> None:
    star = "* the leader: its agent decides for the job"
    assert texts.status([agent(), agent(leads=True)], (), {}, agent()).splitlines()[-1] == star
    assert star not in texts.status([agent()], (), {}, agent()), "nobody leads"
    known = {"term": 7, "entry": 2, "text": "entry 2 of term 6 is committed, round 2; n0, n1 vote"}
    leader = agent(leads=True, rendezvous=known)
    assert texts.status([leader], (), {}, agent()).splitlines()[-2:] == [f"{star} in term 7", known["text"]]


def test_a_list_of_jobs_shows_what_each_runs_and_where() -> None:
    head, *rows = [line.split() for line in texts.jobs([agent(), agent(GENERATED)]).splitlines()]
    assert head[-2:] == ["SCRIPT", "FOLDER"]
    assert [row[-2:] for row in rows] == [["train.py", "/home/ada/resnet"], ["train.py", "/home/ada/717526"]]


@pytest.mark.parametrize(
    "argv, example",
    [
        (["status"], "aelastic status 717526a9"),
        (["logs", "3", "-f"], "aelastic logs --job 717526a9 3 -f"),
        (["stop", "--now"], "aelastic stop 717526a9 --now"),
        (["status", "beginning", "-w"], "aelastic status 717526a9 -w"),
        (["why", "--job", "beginning", "-n", "2"], "aelastic why 717526a9 -n 2"),
        (["logs", "--job=beginning", "3"], "aelastic logs --job 717526a9 3"),
    ],
)
def test_of_several_jobs_each_is_listed_with_what_it_runs_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: list[str], example: str
) -> None:
    jobs = Jobs(tmp_path, argv, "beginning" if "beginning" in " ".join(argv) else "")
    monkeypatch.setattr(jobs, "named", lambda: [("1", agent(GENERATED)), ("2", agent()), ("3", agent())])
    with pytest.raises(NoAnswerError) as caught:
        jobs.meant()
    assert str(caught.value) == (
        f"2 jobs run on this machine; name one, as in {example}: "
        "717526a9 (train.py in /home/ada/717526), resnet (train.py in /home/ada/resnet)"
    )


def test_a_list_of_ended_jobs_shows_what_each_ran() -> None:
    left = [agent(GENERATED, state="FAILED"), agent(state="STOPPED")]
    assert texts.ended(left) == (
        " (ended in the last hour: 717526a9 (train.py), FAILED; resnet (train.py), STOPPED; see aelastic why)"
    )
