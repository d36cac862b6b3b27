"""Causes and decisions: each kind has a text and survives JSON; damaged and newer records are distinguished."""

from __future__ import annotations

import json
from typing import Any

import pytest
from kit import decided

from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.as_json import from_json, to_json
from aelastic.rdzv.decisions.cause import NAMES_MAX, Cause, CauseKind, Innocence, SaveOutcome
from aelastic.rdzv.decisions.decision import Decision, DecisionKind, next_round

FULL = Cause(
    CauseKind.DRAIN, ("n1", "n2"), (3,), 4, 2, 60.0, SaveOutcome.LATE, 1, 2, is_loss=True, detail="spot"
)  # fmt: skip
COLUMNS = 160


@pytest.mark.words
@pytest.mark.parametrize("kind", CauseKind)
def test_each_cause_has_a_sentence_that_fits_into_a_line(kind: CauseKind) -> None:
    text = wording.text_of(FULL.replace(kind=kind))
    assert text and text.isprintable() and len(text) <= COLUMNS
    assert wording.text_of(Cause(kind)).isprintable(), "whatever a peer omits"


@pytest.mark.words
@pytest.mark.parametrize("kind", DecisionKind)
def test_each_decision_has_a_sentence(kind: DecisionKind) -> None:
    full = Decision(
        kind, decided.failed(), 1, 2, 3600.0, 5.0, "exit 3: stop", 0, "KeyError: 1 at train.py:4", ("n1",), "n9", 1.0
    )
    for decision in (Decision(kind, decided.failed()), full):
        assert wording.text_of(decision).isprintable()
    assert len(wording.text_of(full.replace(cordoned=""))) <= COLUMNS
    assert "n9" in wording.text_of(full)


@pytest.mark.words
def test_each_innocence_shows_why_a_host_is_not_blamed() -> None:
    assert wording.blame("vm", Innocence.SIGNAL) == "vm not blamed: a single signal is not evidence of a bad host"
    assert all(wording.blame("vm", each).startswith("vm not blamed: ") for each in Innocence)
    assert wording.blame("vm", None).startswith("vm blamed: ")


@pytest.mark.parametrize("kind", DecisionKind)
def test_a_decision_comes_back_from_json(kind: DecisionKind) -> None:
    for decision in (
        Decision(kind, Cause(CauseKind.ALL_SUCCEEDED)),
        Decision(kind, FULL, 1, 2, 3600.0, 5.0, "exit 3: stop", 0, "KeyError", ("n1",), "n9", 1.0, "n8", 1, 10),
    ):
        assert from_json(json.loads(json.dumps(to_json(decision)))) == decision
    assert to_json(next_round(Cause(CauseKind.NODES_SILENT))) == {
        "kind": "next_round", "cause": {"kind": "nodes_silent"},
    }  # fmt: skip
    assert to_json(None) is None and from_json(None) is None


def test_what_a_newer_version_has_decided_is_not_known() -> None:
    known: dict[str, Any] = {"kind": "restart", "cause": {"kind": "failure", "odd": 7}, "more": "x"}
    assert from_json(known) == Decision(DecisionKind.RESTART, Cause(CauseKind.FAILURE))
    assert from_json({**known, "kind": "paused"}) is None
    assert from_json({**known, "cause": {"kind": "moon"}}) is None


@pytest.mark.parametrize(
    "damaged",
    [
        7, [], {"kind": "restart"}, {"kind": "restart", "cause": 7},
        *({"kind": "restart", "cause": {"kind": "failure", **each}} for each in (
            {"ranks": 1}, {"ranks": ["a"]}, {"hosts": [1]}, {"count": 1.5}, {"count": True}, {"detail": 7}, {"saved": "x"},
        )),
    ],
)  # fmt: skip
def test_what_is_damaged_is_refused(damaged: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  each field has its own message
        from_json(damaged)


def test_a_cause_names_some_of_many_hosts() -> None:
    cause = Cause.of_hosts(CauseKind.NODES_JOINED, [f"n{number:03}" for number in range(40)])
    assert (len(cause.hosts), cause.count, cause.host) == (NAMES_MAX, 40, "")
    assert Cause.of_hosts(CauseKind.NODES_JOINED, ["n1"]).host == "n1"
    assert Cause(CauseKind.CONNECTION_BROKE, ("n1",), is_loss=True).lost_host == "", "its node is back"
