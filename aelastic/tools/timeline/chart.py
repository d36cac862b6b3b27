"""The data of the picture, which the page's script draws: a row for each agent and each worker.

Pure.  `page.js` reads them as they are: stretches of time from `s` to `e`, in seconds since the run began.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from aelastic.diagnose.failures.failure import printable
from aelastic.tools.timeline.boxes import Box, Lines, agent_boxes, fold_all, worker_boxes
from aelastic.tools.timeline.model import Mark, MarkKind, NodeTimeline, Restart, Timeline
from aelastic.tools.timeline.text import duration

Json: TypeAlias = dict[str, Any]

# Rows by the number of workers: height of a worker's and of an agent's row, and the gap between nodes.
SIZES = ((32, 20.0, 20.0, 12.0), (96, 10.0, 13.0, 7.0), (256, 5.0, 9.0, 4.0))
WORKER_ROWS_MAX = SIZES[-1][0]  # with more, the workers of a node share a row: 256 of 5 pixels fill a large screen
COLLAPSED = (14.0, 10.0, 5.0)
NODES_MAX = 500  # rows of nodes that are drawn; a browser still shows a picture of 15,000 pixels
HEAT_PARTS = 160  # of the run, each with the time that it lost
# The look and the name of each kind of mark.  A failure is drawn.
_GLYPHS: dict[MarkKind, tuple[str, str]] = {
    "failure": ("⊗", "failure"), "noticed": ("!", "noticed"), "recovered": ("↻", "recovered in place"),
    "compared": ("≠", "ranks compared"),
    "killed": ("†", "SIGKILL"), "stacks": ("≡", "stacks taken"), "waited": ("…", "nodes missing"),
    "stop asked": ("■", "asked to stop"), "lost": ("?", "records lost"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chart:
    """The picture's data, and notes about it."""

    data: Json
    notes: tuple[str, ...]
    marks: tuple[tuple[str, str], ...]  # the signs that occur, and their meaning


def chart_of(story: Timeline) -> Chart:
    """Returns the picture of a run."""
    nodes, notes = story.nodes[:NODES_MAX], list[str]()
    workers = sum(node.workers for node in nodes)
    fitting = next((sizes for most, *sizes in SIZES if workers <= most), None)
    is_collapsed = fitting is None
    if is_collapsed:
        shared = "those of a node share a row, which shows the worst of them"
        notes.append(f"More than {WORKER_ROWS_MAX} workers: {shared}.")
    if len(nodes) < len(story.nodes):
        notes.append(f"{len(story.nodes) - len(nodes)} more nodes are not drawn.")
    length = max(story.length_s, 1e-6)
    boxes = [(agent_boxes(node), worker_boxes(node, is_collapsed=is_collapsed)) for node in nodes]
    folded, shortest = fold_all(boxes, length)
    if shortest:
        notes.append(f"Neighbouring blocks shorter than {duration(shortest)} are drawn as one: there are too many.")
    marks = [_marks(node) for node in nodes]
    data = {
        "length": length,
        "rows": dict(zip(("worker", "agent", "gap"), fitting or COLLAPSED, strict=True)),
        "nodes": [_node(*each, is_collapsed=is_collapsed) for each in zip(nodes, folded, marks, strict=True)],
        "restarts": [
            {"number": each.number, "s": each.start, "e": each.end, "words": printable(restart_words(each))}
            for each in story.restarts
        ],
        "heat": _heat(story.restarts, length),
    }
    kinds = {mark.kind for line in marks for mark in line}
    return Chart(data, tuple(notes), tuple(_GLYPHS[kind] for kind in _GLYPHS if kind in kinds))


def _node(node: NodeTimeline, boxes: Lines, marks: Sequence[Mark], *, is_collapsed: bool) -> Json:
    agent, workers = boxes
    return {
        "name": printable(node.name),
        "pid": node.pid,
        "ranks": [f"{node.workers} workers"] if is_collapsed else [_rank(node, row) for row in range(node.workers)],
        "agent": [_box(box) for box in agent],
        "workers": [[_box(box) for box in line] for line in workers],
        "marks": [_mark(mark, is_collapsed=is_collapsed) for mark in marks],
    }


def _box(box: Box) -> Json:
    known = {} if box.known_until is None else {"known": box.known_until}
    words = {"classes": box.classes, "words": printable(box.title), "label": box.label}
    return {"s": box.start, "e": box.end, **known, **words, **box.data}


def _rank(node: NodeTimeline, local_rank: int) -> str:
    ranks = node.ranks_of(local_rank)
    match len(ranks):
        case 1:
            return f"rank {ranks[0]}"
        case 2 | 3:
            return f"rank {' → '.join(map(str, ranks))}"
        case _:
            return f"local rank {local_rank}"


def _marks(node: NodeTimeline) -> list[Mark]:
    failures = [
        Mark(
            process.end, "failure", f"rank {process.rank} failed on {node.name}: {process.headline}", process.local_rank
        )
        for process in node.incarnations
        if process.outcome == "failed"
    ]
    return [*node.marks, *failures]


def _mark(mark: Mark, *, is_collapsed: bool) -> Json:
    row = 0 if is_collapsed and mark.local_rank is not None else mark.local_rank  # None: the agent's
    words = printable(f"{mark.text}\n{duration(mark.at)}")
    kind, sign = mark.kind.replace(" ", "-"), _GLYPHS[mark.kind][0]
    return {"at": mark.at, "kind": kind, "sign": sign, "row": row, "words": words}


def restart_words(restart: Restart) -> str:
    """Describes a restart in a few lines."""
    after = "" if restart.is_over else ", and not all workers ran again"
    text = f"Restart {restart.number}{' in place' * restart.in_place}: {duration(restart.took_s)}{after}"
    return "\n".join(filter(None, [text, restart.culprit or restart.reason, recovery_words(restart)]))


def recovery_words(restart: Restart) -> str:
    """Says how many workers kept their processes in a restart in place; empty for other restarts."""
    recovery = restart.recovery
    if recovery is None:
        return ""
    source = f" from rank {recovery.source_rank}" if recovery.source_rank >= 0 else ""
    state = f", state of step {recovery.step}{source}" if recovery.step > 0 else ""
    return f"{recovery.kept} of {recovery.workers} workers kept their processes{state}"


def _heat(restarts: Sequence[Restart], length: float) -> list[Json]:
    """Returns the parts of the run that lost time to restarts: how much, as a share of the most that any part lost."""
    part = length / HEAT_PARTS
    lost, counts = [0.0] * HEAT_PARTS, [0] * HEAT_PARTS
    for restart in restarts:
        first, last = (min(int(at / part), HEAT_PARTS - 1) for at in (restart.start, restart.end))
        counts[first] += 1
        for place in range(first, last + 1):
            lost[place] += max(0.0, min(restart.end, (place + 1) * part) - max(restart.start, place * part))
    return [
        {
            "from": place * part,
            "to": (place + 1) * part,
            "share": seconds / max(lost),
            "words": f"{duration(place * part)} + {duration(part)}\n{counts[place]} restarts began, "
            f"{duration(seconds)} lost",
        }
        for place, seconds in enumerate(lost)
        if seconds > 0
    ]
