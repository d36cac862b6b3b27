"""Renamed fields: the old name is written beside the new one for one minor version, and logs of either are read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from kit import decided
from sources import ROOT

import aelastic
from aelastic.base.renamed import RENAMED, Renamed, with_new_names, with_old_names
from aelastic.observe import run_events as ev
from aelastic.observe.event_log import Records
from aelastic.observe.run_state import RunState
from aelastic.observe.status import describe
from aelastic.rdzv.decisions.as_json import from_json, to_json
from aelastic.tools.timeline.reader import Entry, read_logs

COMPARED = ev.Compared(1, "hang: rank 5 does not wait", (5, 7))
REFERENCE = ROOT / "docs/reference"
# Words that nobody outside knows, or that have another meaning there.  *Held* is what `--on-failure hold` does.
OUR_OWN = {
    "bench", "bill", "board", "door", "enquiry", "excuse", "heard", "hears", "heir", "holds", "hurry", "inquiries",
    "inquiry", "judged", "lives", "odd", "play", "said", "seat", "seats", "standing", "story", "stranger", "strangers",
    "stray", "told",
}  # fmt: skip
NOON = datetime(2026, 11, 21, 12, tzinfo=UTC)
EACH = pytest.mark.parametrize("renamed", RENAMED, ids=lambda renamed: f"{renamed.where}.{renamed.old}")


def recorded(event: ev.RunEvent) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(json.dumps(Records().record(event, "2026-11-21T12:00:00.000000Z", 1.5)))
    return record


def read(record: dict[str, Any]) -> Entry:
    """The record, as commands read it from a log."""
    (log,) = read_logs("events.jsonl", [json.dumps(record).encode() + b"\n"])
    (entry,) = log.entries
    return entry


@EACH
def test_an_object_has_both_names_with_the_same_value(renamed: Renamed) -> None:
    found = with_old_names(renamed.where, {renamed.new: [7], "text": "x"})
    assert found == {renamed.new: [7], renamed.old: [7], "text": "x"}
    assert with_old_names(renamed.where, {"text": "x"}) == {"text": "x"}, "a field that is left out has no old name"
    assert with_old_names("another", {renamed.new: 7}) == {renamed.new: 7}


@EACH
def test_either_name_is_read(renamed: Renamed) -> None:
    for fields in ({renamed.old: 7}, {renamed.new: 7}, {renamed.new: 7, renamed.old: 7}):
        assert with_new_names(renamed.where, fields) == {renamed.new: 7}
    assert with_new_names("another", {renamed.old: 7}) == {renamed.old: 7}


def test_outliers_have_their_old_name_in_the_event_log_in_the_status_and_on_the_event() -> None:
    record, state = recorded(COMPARED), RunState()
    state.tell(COMPARED, 1.0)
    status = describe(state, 1.0, NOON, {})["compared"]
    assert record["outliers"] == record["odd"] == status["outliers"] == status["odd"] == [5, 7]
    assert COMPARED.odd == COMPARED.outliers == (5, 7)


def test_a_decision_has_the_old_name_for_the_nodes_of_its_round_and_is_read_without_the_new_one() -> None:
    decision = decided.restart(1, 3, decided.failed(5)).replace(kept="n1", absent=1, nodes=16)
    fields = to_json(decision)
    assert fields is not None and fields["nodes"] == fields["seats"] == 16
    del fields["nodes"]
    assert from_json(fields) == decision
    record = recorded(ev.Restarting("failure", decision, 1))
    assert record["decision"]["nodes"] == record["decision"]["seats"] == 16
    del record["decision"]["nodes"]
    assert from_json(read(record).fields["decision"]) == decision, "`aelastic policy explain` reads the log"
    assert from_json({**fields, "seats": "x", "nodes": 16}) == decision, "the new name has precedence"


def test_a_log_that_has_only_the_old_name_is_read() -> None:
    record = recorded(COMPARED)
    del record["outliers"]
    fields = read(record).fields
    assert fields["outliers"] == [5, 7] and "odd" not in fields
    assert fields == read(recorded(COMPARED)).fields


def names_in(schema: Any) -> Iterator[str]:
    """The names of fields and values in a JSON Schema, at any depth."""
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        yield from [str(each) for each in (*schema.get("enum", ()), schema.get("const")) if each is not None]
    for value in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(value, dict | list):
            yield from names_in(value)


def names_of_users() -> dict[str, set[str]]:
    """Every name in the event log, and in the tables of the reference pages, which other tests keep complete."""
    found = {"event-log.schema.json": set(names_in(json.loads((REFERENCE / "event-log.schema.json").read_text())))}
    for page in ("json.md", "http.md", "event-log.md", "metrics.md", "cli.md", "environment.md"):
        text = (REFERENCE / page).read_text().replace("\\|", "/")
        text = text.partition("### Renamed fields")[0] + text.partition("### Renamed fields")[2].partition("\n## ")[2]
        rows = "\n".join(line for line in text.splitlines() if line.startswith("|"))
        found[page] = set(re.findall(r"`([^`]+)`", rows))
    return found


@pytest.mark.parametrize("page, names", names_of_users().items())
def test_no_name_has_a_word_of_our_own(page: str, names: set[str]) -> None:
    assert len(names) > 10, "the page has tables of names"
    old = {each.old for each in RENAMED} if page.endswith(".json") else set()
    parts = {part: name for name in names - old for part in re.split(r"[^a-z]+", name.lower())}
    assert not {part: parts[part] for part in OUR_OWN & parts.keys()}


def test_users_can_look_up_each_old_name() -> None:
    page = (REFERENCE / "event-log.md").read_text().partition("### Renamed fields")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| `(\w+)`.* \| (\S+) \|$", page, re.MULTILINE)
    assert {Renamed(where, old, new, version) for old, new, where, version in rows} == {*RENAMED}
    deprecated = (ROOT / "CHANGELOG.md").read_text().partition("### Deprecated")[2].partition("### ")[0]
    assert all(f"`{each.old}`" in deprecated and f"`{each.new}`" in deprecated for each in RENAMED)


@EACH
def test_an_old_name_goes_with_the_version_that_was_promised(renamed: Renamed) -> None:
    version = tuple(map(int, re.findall(r"\d+", aelastic.__version__)[:2]))
    assert version < tuple(map(int, renamed.removed_in.split("."))), "remove this row"
