"""The events of a simulation in readable words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from aelastic.base.record import Record
from aelastic.errors import ProcessFailure
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.decision import Decision
from aelastic.rdzv.log.entries import Accepted, Entry, EntryId
from aelastic.rdzv.protocol import messages as m


def in_words(what: Any) -> str:  # noqa: C901, PLR0912  flat: a line for each word
    match what:
        case Entry():
            return in_words(what.id) + " (verdict)" * what.is_verdict
        case EntryId():
            return f"entry {what.term}.{what.number} {what.digest[:4]}"
        case Accepted():
            return f"{in_words(what.entry)} in term {what.term}"
        case m.LeaderAt():
            return f"{what.node_id} ({what.token[:4]})"
        case Decision():
            return repr(wording.text_of(what))
        case m.Node():
            return what.node_id
        case ProcessFailure():
            return f"failure of rank {what.rank}"
        case m.Terms():
            return ""
        case m.Assigned():
            ranks = what.ranks
            return (
                f"Assigned round {what.round}, group rank {ranks.group_rank} of {ranks.group_world_size}, "
                f"restarts {what.restart_count}"
            )
        case m.Interrupted():
            return f"Interrupted round {what.round}, restarts {what.restart_count}: {wording.text_of(what.decision)!r}"
        case m.Past():
            place = f"round {what.round} of term {what.term}" if what.round else "new"
            return f"{what.phase} ({place}{', charged' * what.is_charged})"
        case m.Hello():
            return f"Hello from {in_words(what.status)}"
        case m.Status():
            wishes = [
                *(f"asks for {each.verb}" for each in what.asks),
                *(
                    type(each).__name__
                    for each in (what.frozen, what.saved, what.question, what.places, what.left)
                    if each
                ),
            ]
            log = "" if what.log is None else f"term {what.log.term}, committed {in_words(what.log.committed)}"
            if what.log is not None and what.log.accepted is not None:
                log += f", accepted {in_words(what.log.accepted)}"
            return ", ".join([f"{what.node.node_id}: {in_words(what.past)}", what.node.starts, *wishes, log])
        case m.Plan():
            parts = [in_words(value) for name, value in _parts(what)]
            return f"Plan of term {what.term}: {'; '.join(parts) or 'wait'}"
        case Record():
            fields = " ".join(in_words(value) for value in what.__dict__.values() if value not in (None, ""))
            return f"{type(what).__name__} {fields}".rstrip()
        case _:
            return str(what)


def _parts(plan: m.Plan) -> list[tuple[str, Any]]:
    """The decisions in a plan."""
    fields = [(name, getattr(plan, name)) for name in m.Plan.__match_args__ if name not in {"term", "lease_s"}]
    return [(name, f"{name}" if value is True else value) for name, value in fields if value]


def without_repetition(lines: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Keeps only the first and the last of lines that repeat with other numbers (looks, keeps, beats)."""
    kept: list[tuple[float, str]] = []
    last: dict[str, tuple[float, str]] = {}  # by the form of the words: the latest line, if it was not kept
    recent: Counter[str] = Counter()
    for now, words in lines:
        form = re.sub(r"\d+(?!#)\b", "", words) if _IDLE.search(words) else ""
        if not form:
            kept += sorted(last.values())
            last.clear()
            recent.clear()
        elif recent[form]:
            last[form] = now, words + " (again)"
            continue
        recent[form] += 1
        kept.append((now, words))
    return kept + sorted(last.values())


_IDLE = re.compile(
    r"DeadlinePassed( \| (ReadCell|Send Alive|WriteCell.*))*$|CellFailed|CellAnswered|Received \d+ Heartbeat|Received \d+ Alive"
)
