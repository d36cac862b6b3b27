"""What happens in a simulation, in words that a person can read."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from aelastic.core.record import Record
from aelastic.decisions import wording
from aelastic.decisions.decision import Decision
from aelastic.errors import ProcessFailure
from aelastic.rdzv.leader_record import Candidate, LeaderRecord
from aelastic.rdzv.protocol import messages as m


def in_words(what: Any) -> str:  # noqa: C901, PLR0912  flat: a line for each word
    match what:
        case LeaderRecord():
            renewals = "" if what.renewals is None else f", {what.renewals} renewals"
            closed = ", closed" if what.verdict else ""
            return f"epoch {what.epoch} of {in_words(what.candidate)}{renewals}{closed}"
        case Candidate():
            return f"{what.node_id} ({what.token[:4]})"
        case m.Seats():
            closing = "" if what.closing is None else f", closing: {in_words(what.closing.verdict)}"
            return f"Seats of round {what.round}: {', '.join(seat.node_id for seat in what.seats)}{closing}"
        case m.Elected():
            return f"epoch {what.epoch} of {what.node_id}"
        case m.Seat():
            return what.node_id
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
            place = f"round {what.round} rank {what.group_rank} of {what.group_world_size}" if what.round else "new"
            return f"{what.standing} ({place}, restarts {what.restart_count})"
        case m.Hello():
            return f"Hello from {in_words(what.status)}, knows epoch {what.seen_epoch}"
        case m.Status():
            wishes = [
                *(f"asks for {each.verb}" for each in what.asks),
                *(
                    type(each).__name__
                    for each in (what.frozen, what.saved, what.question, what.places, what.left)
                    if each
                ),
            ]
            return ", ".join([f"{what.node.node_id}: {in_words(what.past)}", what.node.starts, *wishes])
        case m.Plan():
            parts = [in_words(value) for name, value in _parts(what)]
            return f"Plan of epoch {what.epoch}: {'; '.join(parts) or 'wait'}"
        case Record():
            fields = " ".join(in_words(value) for value in what.__dict__.values() if value not in (None, ""))
            return f"{type(what).__name__} {fields}".rstrip()
        case _:
            return str(what)


def _parts(plan: m.Plan) -> list[tuple[str, Any]]:
    """What a plan has decided."""
    fields = [(name, getattr(plan, name)) for name in m.Plan.__match_args__ if name not in {"epoch", "lease_s"}]
    return [(name, f"{name}" if value is True else value) for name, value in fields if value]


def without_repetition(lines: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Of what comes again and again, with other numbers only (looks, keeps, beats), the first and the last."""
    kept: list[tuple[float, str]] = []
    last: dict[str, tuple[float, str]] = {}  # form of the words to the last time, if that was not kept
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
    r"DeadlinePassed( \| (ReadBoard|Send Alive|Renew))*$|BoardFailed|BoardRead|Received \d+ Heartbeat|Renewed|Received \d+ Alive|^board .*(read|renew)"
)
