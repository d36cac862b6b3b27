"""The view of nodes and ranks, as lines of text."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from aelastic.observe.run_state import RunState, WorkerNow
from aelastic.observe.status_text import Picture, StatusText

pytest.importorskip("rich")

from aelastic.base.host.process_states import ProcessStates
from aelastic.observe.ui.rank_view import RankView


@pytest.fixture(autouse=True)
def colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)


def rank(number: int, **fields: Any) -> WorkerNow:
    return WorkerNow(**{"rank": number, "local_rank": number, "state": "running", **fields})


def picture(*ranks: WorkerNow, **fields: Any) -> Picture:
    texts: dict[str, Any] = {"node": "run job on a | group rank 0 of 2", "failure": "", "took": "", **fields}
    return Picture(title=("aelastic 7 s", "running"), ranks=ranks, **texts)


def rows(
    shown: Picture, columns: int = 79, most: int = 12, view: RankView | None = None, now: float = 0.0
) -> list[str]:
    drawn = [row.decode() for row in (view or RankView(StatusText(RunState()))).rows(shown, now, columns, most)]
    return [re.sub(r"\x1b\[[0-9;]*m", "", row).rstrip() for row in drawn]


def test_everything_fits_in_a_row_for_each_rank() -> None:
    shown = picture(
        rank(0, state="succeeded"),
        rank(1, state="failed"),
        rank(2, note="no sign of life for 60 s"),
        failure="last failure, 5 s ago: rank 1 on a: boom",
        took="phases took: spawn 0.1 s",
    )
    assert rows(shown) == [
        "aelastic 7 s | running",
        "run job on a | group rank 0 of 2",
        "rank  local  pid  state                              CPU  memory",
        "   0      0       succeeded",
        "   1      1       failed",
        "   2      2       running: no sign of life for 60 s",
        "last failure, 5 s ago: rank 1 on a: boom",
        "phases took: spawn 0.1 s",
    ]


def test_of_too_many_ranks_those_that_do_not_simply_run_are_shown() -> None:
    shown = rows(picture(*[rank(number, state="failed" if number == 77 else "running") for number in range(100)]))
    assert len(shown) == 12
    assert [row.split()[0] for row in shown[3:-1]] == ["0", "1", "2", "3", "4", "5", "6", "77"]
    assert shown[-1] == "and 92 ranks more"


@pytest.mark.parametrize("most", range(8))
def test_a_low_terminal_gets_no_more_rows_than_it_has(most: int) -> None:
    shown = rows(picture(rank(0), rank(1), rank(2), failure="failed", took="took"), most=most)
    assert 1 <= len(shown) <= max(1, most)
    assert shown[0] == "aelastic 7 s | running"


@pytest.mark.parametrize("columns", [1, 5, 20, 40])
def test_a_narrow_terminal_cuts_rows_and_wraps_none(columns: int) -> None:
    shown = picture(rank(0, id=1 << 22, note="x" * 100), rank(1), failure="f" * 100, took="t" * 100, node="größe" * 20)
    drawn = rows(shown, columns=columns)
    assert len(drawn) == 7 and all(len(row) <= columns for row in drawn)


def test_cpu_is_that_since_the_last_look_and_a_process_that_is_gone_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from aelastic.base.host.usage import Usage

    used = {41: 10.0, 42: None}

    def usage_of(pid: int, session: int) -> Usage | None:
        assert session == pid  # a worker leads its session
        return None if (cpu_s := used[pid]) is None else Usage(cpu_s, 3 << 20)

    monkeypatch.setattr("aelastic.observe.ui.rank_view.usage_of", usage_of)
    view, shown = RankView(StatusText(RunState())), picture(rank(0, id=41), rank(1, id=42))
    assert rows(shown, view=view, now=100.0)[3].split() == ["0", "0", "41", "running", "3", "MiB"]
    used[41] = 13.0
    assert rows(shown, view=view, now=102.0)[3].split() == ["0", "0", "41", "running", "150%", "3", "MiB"]
    assert rows(shown, view=view, now=104.0)[4].split() == ["1", "1", "42", "running"]


def test_a_worker_that_the_kernel_does_not_let_run_on_is_not_said_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessStates, "look", lambda _, pids, now: {rank: "stopped" for rank in pids if rank == 1})
    shown = picture(rank(0, id=1 << 22), rank(1, id=(1 << 22) + 1, note="no output for 60 s"), rank(2, state="failed"))
    words = "stopped by a signal (SIGCONT continues it): no output for..."
    assert [row.split(maxsplit=3)[3] for row in rows(shown, columns=120)[3:5]] == ["running", words]


def test_endpoints_have_a_row_below_the_ranks() -> None:
    assert rows(picture(rank(0), endpoints="endpoints: n0:1 answers for 7 s"))[-1] == "endpoints: n0:1 answers for 7 s"


def test_no_control_sequence_of_others_gets_through() -> None:
    shown = picture(rank(0, note="\x1b[2Jbad"), failure="\x1b]0;title\x07", node="[red]not markup[/red] :smile:")
    assert not [row for row in rows(shown) if "\x1b" in row or "\x07" in row]
    assert rows(shown)[1] == "[red]not markup[/red] :smile:"


def test_colours_are_shown_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    coloured = RankView(StatusText(RunState())).rows(picture(rank(0, state="failed")), 0.0, 79, 12)
    monkeypatch.setitem(os.environ, "NO_COLOR", "1")
    plain = RankView(StatusText(RunState())).rows(picture(rank(0, state="failed")), 0.0, 79, 12)
    assert any(b"\x1b[31mfailed" in row for row in coloured)
    assert not any(b"\x1b[3" in row for row in plain)
