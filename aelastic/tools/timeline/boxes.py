"""The boxes of the picture: what a row shows in a stretch of time, and its text.

If there are too many boxes, short neighbours become one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from aelastic.tools.timeline.model import Incarnation, NodeTimeline
from aelastic.tools.timeline.text import duration

BLOCKS_MAX = 20_000  # that are drawn; a browser draws as many within half a second
FOLD_PARTS = 2028  # half a pixel of the plot: the shortest length that is tried first
_WORST_FIRST = ("failed", "open", "stopped", "succeeded")


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle in a row: a stretch of time, and its texts."""

    start: float
    end: float
    classes: str
    title: str
    label: str = ""
    data: Mapping[str, str | int] = field(default_factory=dict)  # what else is known about it
    known_until: float | None = None  # from then on it is a guess


def agent_boxes(node: NodeTimeline) -> list[Box]:
    boxes = []
    for block in node.blocks:
        text = f"{node.name} · {block.name}\n{duration(block.start)} + {duration(block.end - block.start)}"
        end, known = (max(block.end, node.gone_by), block.end) if block.is_open else (block.end, None)
        text += f"\n{_open_words(node)}" if block.is_open else ""
        boxes.append(Box(block.start, end, f"phase {block.name}", text, block.name, {"name": block.name}, known))
    return boxes


def _open_words(node: NodeTimeline) -> str:
    if node.closing == "running":
        return "still running"
    words = "cut off" if node.closing == "cut off" or node.gone_by > node.ends else "still running or cut off"
    gone = f", gone by {duration(node.gone_by)}" if node.gone_by > node.ends else ""
    return f"{words}: last record at {duration(node.ends)}{gone}"


def worker_boxes(node: NodeTimeline, *, is_collapsed: bool) -> list[list[Box]]:
    incarnations = sorted(node.incarnations, key=lambda process: process.start)
    if is_collapsed:
        generations: dict[int, list[Incarnation]] = {}
        for process in incarnations:
            generations.setdefault(process.generation, []).append(process)
        return [[_generation_box(node, same) for same in generations.values()]]
    lines: list[list[Box]] = [[] for _ in range(node.workers)]
    for process in incarnations:
        if process.local_rank < node.workers:
            lines[process.local_rank].append(_process_box(node, process))
            if process.kind and process.is_up_at is not None:
                lines[process.local_rank].append(_start_box(process, process.is_up_at))
    return lines


def _start_box(process: Incarnation, until: float) -> Box:
    text = f"rank {process.rank} · generation {process.generation} · {process.kind} start"
    for what, at in (("first output", process.output_at), ("process group", process.group_at)):
        text += (
            "" if at is None else f"\n{what} {duration(max(0.0, at - process.start))} after all workers were started"
        )
    return Box(process.start, max(process.start, until), f"start {process.kind}", text)


def _process_box(node: NodeTimeline, process: Incarnation) -> Box:
    words = "running" if process.outcome == "open" else process.outcome
    replacement = ", replacement" * process.is_replacement
    text = (
        f"rank {process.rank} · generation {process.generation}{replacement} · {words}\n"
        f"{node.name}, local rank {process.local_rank}, "
        f"pid {process.pid}, round {process.round}\n{duration(process.start)} + {duration(process.end - process.start)}"
    )
    text += f"\n{process.progress}" if process.progress else ""
    if process.headline:
        code = "" if process.exitcode is None else f" (exit code {process.exitcode})"
        text += f"\n{process.headline}{code}"
        if process.known_at > process.end:
            text += f"\nknown {duration(process.known_at - process.end)} later"
    end, known = process.end, None
    if process.outcome == "open":
        text += f"\n{_open_words(node)}"
        end, known = max(process.end, node.gone_by), process.end
    rank = f"rank {process.rank} · " if len(node.ranks_of(process.local_rank)) > 1 else ""
    data = {"generation": process.generation, "rank": process.rank}
    label = "replacement" if process.is_replacement else f"generation {process.generation}"
    return Box(process.start, end, f"life {process.outcome}", text, f"{rank}{label}", data, known)


def _generation_box(node: NodeTimeline, incarnations: Sequence[Incarnation]) -> Box:
    """Returns one box for all workers of a node, of one generation."""
    worst = min((process.outcome for process in incarnations), key=_WORST_FIRST.index)
    start, end = min(process.start for process in incarnations), max(process.end for process in incarnations)
    ranks = f"ranks {min(process.rank for process in incarnations)} to {max(process.rank for process in incarnations)}"
    text = (
        f"{node.name} · {ranks} · generation {incarnations[0].generation}\n{duration(start)} + {duration(end - start)}"
    )
    for outcome in _WORST_FIRST:
        if count := sum(process.outcome == outcome for process in incarnations):
            text += f"\n{count} {'running' if outcome == 'open' else outcome}"
    text += "".join(f"\nrank {process.rank}: {process.headline}" for process in incarnations[:8] if process.headline)
    known = end if worst == "open" else None
    end = max(end, node.gone_by) if worst == "open" else end
    data = {"generation": incarnations[0].generation}
    return Box(start, end, f"life {worst}", text, f"generation {incarnations[0].generation}", data, known)


Lines: TypeAlias = tuple[list[Box], list[list[Box]]]


def fold_all(boxes: Sequence[Lines], length: float) -> tuple[Sequence[Lines], float]:
    """Makes fewer boxes if there are too many; also returns the length below which a box was merged."""
    shortest, folded = 0.0, boxes
    while sum(len(agent) + sum(map(len, workers)) for agent, workers in folded) > BLOCKS_MAX and shortest < length:
        shortest = shortest * 2 or length / FOLD_PARTS
        folded = [(_fold(agent, shortest), [_fold(line, shortest) for line in workers]) for agent, workers in boxes]
    return folded, shortest


def _fold(line: Iterable[Box], shortest: float) -> list[Box]:
    """Makes one box of neighbours that are short, with the look of what took most of their time."""
    folded: list[Box] = []
    for is_short, group in itertools.groupby(line, lambda box: box.end - box.start < shortest):
        boxes = list(group)
        if not is_short or len(boxes) == 1:
            folded += boxes
            continue
        took: dict[str, float] = defaultdict(float)
        for box in boxes:
            took[box.classes] += box.end - box.start
        most = max(took, key=lambda classes: took[classes])
        title = f"{len(boxes)} short ones\n{duration(boxes[0].start)} + {duration(boxes[-1].end - boxes[0].start)}"
        folded.append(Box(boxes[0].start, boxes[-1].end, f"{most} folded", title))
    return folded
