"""Merges the logs of all nodes: into one timeline, with the cost of each restart.

A restart begins when the first worker was gone or, where nodes came or went, when the first agent knew of it.  It is
over when the last node of the next round has started all its workers.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from aelastic.observe.time_spent import GAP_S, TimeSpent
from aelastic.tools.timeline.chain import Link, chains_of
from aelastic.tools.timeline.model import (
    CLOSING_WORDS,
    RESTART_PHASES,
    Block,
    Followed,
    NodeTimeline,
    Recovery,
    Restart,
    Share,
    Timeline,
)
from aelastic.tools.timeline.node_reader import NodeReader
from aelastic.tools.timeline.reader import Log, in_order, offsets_of
from aelastic.tools.timeline.text import counted


def timeline_from(logs: Sequence[Log]) -> Timeline:
    """Merges the logs of one run.

    Args:
        logs: at least one, each with at least one entry.
    """
    offsets, notes = offsets_of(logs)
    begins = [log.first_wall - offset for log, offset in zip(logs, offsets, strict=True)]
    zero = min(begins)
    nodes = [NodeReader(log, offset + zero).read() for log, offset in zip(logs, offsets, strict=True)]
    nodes.sort(key=lambda node: (node.group_rank, node.begins))
    length = max(node.ends for node in nodes)
    _bound_open_ends(nodes, length)
    count = Counter(node.name for node in nodes)
    for node in nodes:
        if count[node.name] > 1:  # agents of one host also get their pid
            node.name = f"{node.name} · {node.pid}"
    restarts = _restarts(nodes, length, chains_of(logs, offsets))
    ended = [node for node in nodes if node.closing == "ended"]
    last = max(ended, key=lambda node: node.ends, default=None)
    is_over = last is not None and all(node.closing in {"ended", "cut off"} or node.gone_by < length for node in nodes)
    # The first worker that failed in the last round, if no other round had to follow.
    number = max(number for node in nodes for number in (0, *node.formed))
    _, culprit = min(_failures(nodes).get(number, []), default=(0.0, ""))
    culprit = "" if any(number in node.notices for node in nodes) else culprit
    return Timeline(
        run_id=logs[0].run_id,
        entrypoint=next((node.entrypoint for node in nodes if node.entrypoint), ""),
        began=logs[begins.index(zero)].began,
        length_s=length,
        nodes=tuple(nodes),
        restarts=tuple(restarts),
        spent=_spent(logs, zero, length),
        state=last.state if last is not None and is_over else "",
        reason=last.reason if last is not None and is_over else "",
        culprit=culprit if last is not None and is_over and last.state == "FAILED" else "",
        notes=(*notes, *_notes_on(logs, nodes)),
    )


def _bound_open_ends(nodes: Sequence[NodeTimeline], length: float) -> None:
    """Sets until when an agent whose log does not end may have lived: until a round was complete without it."""
    for node in nodes:
        node.gone_by = node.ends
        if node.closing in {"cut off", "unknown"}:
            last = max(node.formed, default=0)
            later = [at for other in nodes for number, at in other.formed.items() if number > last and at > node.ends]
            still = length if node.closing == "unknown" else node.ends
            node.gone_by = min(later, default=still)


def _restarts(nodes: Sequence[NodeTimeline], length: float, chains: Mapping[str, Sequence[Link]]) -> list[Restart]:
    over = sorted({number for node in nodes for number in node.notices})
    rounds = sorted({number for node in nodes for number in node.formed})
    failures = _failures(nodes)
    firsts = [
        min((node.notices[number] for node in nodes if number in node.notices), key=lambda each: each.at)
        for number in over
    ]
    # When each began, and the failed worker.
    begins = [
        min([*failures.get(number, []), (first.at, "")]) if first.cause == "failure" else (first.at, "")
        for number, first in zip(over, firsts, strict=True)
    ]
    restarts = []
    for place, number in enumerate(over):
        start, culprit = begins[place]
        limit = max(begins[place + 1][0] if place + 1 < len(over) else length, start)
        later = bisect.bisect_right(rounds, number)
        next_round = rounds[later] if later < len(rounds) else None
        again = [node for node in nodes if next_round in node.formed]
        is_over = bool(again) and all(next_round in node.started for node in again)
        end = max(node.started[next_round or 0] for node in again) if is_over else limit
        is_over, end = is_over and end <= limit, min(max(start, end), limit)
        shares = [
            Share(
                index,
                _cut(node, start, end, was_there=number in node.notices),
                *_start_of(node, next_round, start),
            )
            for index, node in enumerate(nodes)
            if number in node.notices or next_round in node.formed
        ]
        first = firsts[place]
        recovery = _recovery(nodes, next_round)
        in_place = first.in_place and (recovery is not None or not is_over)
        known = place + 1, number, next_round, first.cause, first.reason, culprit, start, end, is_over, tuple(shares)
        restarts.append(Restart(*known, in_place, recovery, _followed(chains.get(first.stimulus, ()))))
    return restarts


def _followed(chain: Sequence[Link]) -> tuple[Followed, ...]:
    return tuple(Followed(link.at - chain[0].at, link.text, link.where) for link in chain)


def _recovery(nodes: Sequence[NodeTimeline], number: int | None) -> Recovery | None:
    """Returns how the workers of all nodes continued in place in a round; `None` if they did not."""
    found = [node.recovered[number] for node in nodes if number is not None and number in node.recovered]
    if not found:
        return None
    # Ranks that have kept their state name themselves; a replacement names the rank that sent it.
    source = max(found, key=lambda each: each.workers - each.kept)
    workers = sum(node.workers for node in nodes if number in node.formed)  # also of nodes that kept none
    return Recovery(sum(each.kept for each in found), workers, source.step, source.source_rank)


def _failures(nodes: Sequence[NodeTimeline]) -> dict[int, list[tuple[float, str]]]:
    """Returns by round when workers failed, which, and why."""
    failures: dict[int, list[tuple[float, str]]] = {}
    for node in nodes:
        for process in node.incarnations:
            if process.outcome == "failed":
                words = f"rank {process.rank} on {node.name}: {process.headline}"
                failures.setdefault(process.last_round, []).append((process.end, words))
        for mark in node.marks:
            if mark.kind == "failure":
                failures.setdefault(mark.round, []).append((mark.at, f"{mark.text} (on {node.name})"))
    return failures


def _cut(node: NodeTimeline, start: float, end: float, *, was_there: bool) -> tuple[Block, ...]:
    """Returns a node's phases in a restart; it did not know of it while its workers still ran, or had finished."""
    blocks: list[Block] = []
    is_news = was_there
    first = bisect.bisect_right(node.blocks, start, key=lambda block: block.end)
    last = bisect.bisect_left(node.blocks, end, key=lambda block: block.start)
    for block in node.blocks[first:last]:
        if block.name in RESTART_PHASES and block.name != "detect":
            is_news = False
        name = "detect" if is_news else block.name
        begins, ends = max(block.start, start), min(block.end, end)
        if begins < ends and name in RESTART_PHASES:
            if blocks and blocks[-1].name == name:
                begins = blocks.pop().start
            blocks.append(Block(name, begins, ends))
    return tuple(blocks)


def _start_of(node: NodeTimeline, number: int | None, since: float) -> tuple[str, float | None]:
    """Returns how a node's workers of a round were started, and how long it took until one had written something."""
    incarnations = [process for process in node.incarnations if process.round == number]
    outputs = [process.output_at for process in incarnations if process.output_at is not None]
    kinds = sorted({process.kind for process in incarnations if process.kind}, reverse=True)
    return " and ".join(kinds), max(0.0, min(outputs) - since) if outputs else None


def _spent(logs: Sequence[Log], zero: float, length: float) -> dict[str, float]:
    """Returns how the whole run spent its time, by `time_spent.ON`."""
    spent = TimeSpent(GAP_S)
    for at, entry in in_order(logs):
        with suppress(ValueError, TypeError):  # a field is missing; the others count
            spent.handle(entry.kind, entry.fields.get, at)
    return spent.until(zero + length)


def _notes_on(logs: Sequence[Log], nodes: Sequence[NodeTimeline]) -> list[str]:
    notes = []
    damaged = sum(log.damaged for log in logs)
    if damaged:
        where = ", ".join(log.source for log in logs if log.damaged)
        notes.append(f"{counted(damaged, 'damaged line')} left out ({where}).")
    if incomplete := sum(node.incomplete for node in nodes):
        notes.append(f"{counted(incomplete, 'record')} with missing fields left out.")
    if lost := sum(node.lost for node in nodes):
        notes.append(f"{counted(lost, 'record')} could not be written when they happened.")
    for node in nodes:
        if node.closing in CLOSING_WORDS:
            words = CLOSING_WORDS[node.closing]
            notes.append(f"{node.name}: {words}; its log ends at {node.ends:.3f} s.")
    return notes
