"""The boxes of the picture: what a row shows in a stretch of time, and its text.

If there are too many boxes, short neighbours become one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from aelastic.tools.timeline.model import Life, NodeStory
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


def agent_boxes(node: NodeStory) -> list[Box]:
    boxes = []
    for block in node.blocks:
        text = f"{node.name} · {block.name}\n{duration(block.start)} + {duration(block.end - block.start)}"
        end, known = (max(block.end, node.gone_by), block.end) if block.is_open else (block.end, None)
        text += f"\n{_open_words(node)}" if block.is_open else ""
        boxes.append(Box(block.start, end, f"phase {block.name}", text, block.name, {"name": block.name}, known))
    return boxes


def _open_words(node: NodeStory) -> str:
    if node.closing == "running":
        return "still running"
    words = "cut off" if node.closing == "cut off" or node.gone_by > node.ends else "still running or cut off"
    gone = f", gone by {duration(node.gone_by)}" if node.gone_by > node.ends else ""
    return f"{words}: last record at {duration(node.ends)}{gone}"


def worker_boxes(node: NodeStory, *, is_collapsed: bool) -> list[list[Box]]:
    lives = sorted(node.lives, key=lambda life: life.start)
    if is_collapsed:
        generations: dict[int, list[Life]] = {}
        for life in lives:
            generations.setdefault(life.generation, []).append(life)
        return [[_generation_box(node, same) for same in generations.values()]]
    lines: list[list[Box]] = [[] for _ in range(node.workers)]
    for life in lives:
        if life.local_rank < node.workers:
            lines[life.local_rank].append(_life_box(node, life))
            if life.kind and life.is_up_at is not None:
                lines[life.local_rank].append(_start_box(life, life.is_up_at))
    return lines


def _start_box(life: Life, until: float) -> Box:
    text = f"rank {life.rank} · generation {life.generation} · {life.kind} start"
    for what, at in (("first output", life.output_at), ("process group", life.group_at)):
        text += "" if at is None else f"\n{what} {duration(max(0.0, at - life.start))} after all workers were started"
    return Box(life.start, max(life.start, until), f"start {life.kind}", text)


def _life_box(node: NodeStory, life: Life) -> Box:
    words = "running" if life.outcome == "open" else life.outcome
    replacement = ", replacement" * life.is_replacement
    text = (
        f"rank {life.rank} · generation {life.generation}{replacement} · {words}\n"
        f"{node.name}, local rank {life.local_rank}, "
        f"pid {life.pid}, round {life.round}\n{duration(life.start)} + {duration(life.end - life.start)}"
    )
    text += f"\n{life.progress}" if life.progress else ""
    if life.headline:
        code = "" if life.exitcode is None else f" (exit code {life.exitcode})"
        text += f"\n{life.headline}{code}"
        if life.known_at > life.end:
            text += f"\nknown {duration(life.known_at - life.end)} later"
    end, known = life.end, None
    if life.outcome == "open":
        text += f"\n{_open_words(node)}"
        end, known = max(life.end, node.gone_by), life.end
    rank = f"rank {life.rank} · " if len(node.ranks_of(life.local_rank)) > 1 else ""
    data = {"generation": life.generation, "rank": life.rank}
    label = "replacement" if life.is_replacement else f"generation {life.generation}"
    return Box(life.start, end, f"life {life.outcome}", text, f"{rank}{label}", data, known)


def _generation_box(node: NodeStory, lives: Sequence[Life]) -> Box:
    """Returns one box for all workers of a node, of one generation."""
    worst = min((life.outcome for life in lives), key=_WORST_FIRST.index)
    start, end = min(life.start for life in lives), max(life.end for life in lives)
    ranks = f"ranks {min(life.rank for life in lives)} to {max(life.rank for life in lives)}"
    text = f"{node.name} · {ranks} · generation {lives[0].generation}\n{duration(start)} + {duration(end - start)}"
    for outcome in _WORST_FIRST:
        if count := sum(life.outcome == outcome for life in lives):
            text += f"\n{count} {'running' if outcome == 'open' else outcome}"
    text += "".join(f"\nrank {life.rank}: {life.headline}" for life in lives[:8] if life.headline)
    known = end if worst == "open" else None
    end = max(end, node.gone_by) if worst == "open" else end
    data = {"generation": lives[0].generation}
    return Box(start, end, f"life {worst}", text, f"generation {lives[0].generation}", data, known)


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
