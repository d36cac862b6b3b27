"""The picture: a story as SVG, with a row for each agent and each worker.

Pure.  Every element that stands for a time has it in `data-s` and `data-e`, in seconds; the script in `assets` moves
them when the reader zooms.  Without the script the whole run is shown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aelastic.timeline.boxes import Box, agent_boxes, fold_all, worker_boxes
from aelastic.timeline.model import Mark, MarkKind, NodeStory, Restart, Story
from aelastic.timeline.text import duration, safe

WIDTH, LEFT, RIGHT = 1200, 172, 14
PLOT_WIDTH = WIDTH - LEFT - RIGHT
# Above the rows: numbers of the restarts, then the times.
FLAGS_HEIGHT, AXIS_HEIGHT = 24, 22
HEAT_TOP, HEAT_HEIGHT, HEAT_PARTS = 22, 16, 160  # where the run lost time, and in how many parts it is looked at
LINES_MAX = 60  # with more restarts in sight their lines would hide the rows
# Rows by the number of workers: height of a worker's and of an agent's row, and the gap between nodes.
SIZES = ((32, 20.0, 20.0, 12.0), (96, 10.0, 13.0, 7.0), (256, 5.0, 9.0, 4.0))
WORKER_ROWS_MAX = SIZES[-1][0]  # with more, the workers of a node share a row: 256 of 5 pixels fill a large screen
COLLAPSED = (14.0, 10.0, 5.0)
NODES_MAX = 500  # rows of nodes that are drawn; a browser shows a picture of 15,000 pixels yet
BLOCK_WIDTH_MIN = 1.5  # pixels, so that a short block is still seen
START_PART = 0.22  # of a worker's row
BLOCK_GAP = 0.8  # pixels between two blocks, so that they are seen to be two
NAME_CHARS_MAX = 21
# Of a sans-serif letter of 11 pixels, on average, rounded up.
_LETTER_WIDTH = 6.4
_TICKS_S = (
    1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5,
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 432000, 864000,
)  # fmt: skip
TICKS_MAX = 10
# What each kind of mark looks like, and is called.  A failure is drawn.
_GLYPHS: dict[MarkKind, tuple[str, str]] = {
    "failure": ("⊗", "failure"), "noticed": ("!", "noticed"), "compared": ("≠", "ranks compared"),
    "killed": ("†", "SIGKILL"), "stacks": ("≡", "stacks taken"), "waited": ("…", "nodes missing"),
    "stop asked": ("■", "asked to stop"), "lost": ("?", "records lost"),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Chart:
    """The picture, and notes about it."""

    svg: str
    notes: tuple[str, ...]
    marks: tuple[tuple[str, str], ...]  # the signs that occur, and what they stand for


class _Rows:
    """The vertical places of all rows."""

    def __init__(self, nodes: Sequence[NodeStory]) -> None:
        workers = sum(node.workers for node in nodes)
        fitting = [sizes for most, *sizes in SIZES if workers <= most]
        self.is_collapsed = not fitting
        self.worker, self.agent, self.gap = fitting[0] if fitting else COLLAPSED
        self.tops: list[float] = []
        y = self.gap / 2
        for node in nodes:
            self.tops.append(y)
            y += self.agent + self.worker * (1 if self.is_collapsed else node.workers) + self.gap
        self.height = y


def draw(story: Story) -> Chart:
    """The picture of a run."""
    nodes = story.nodes[:NODES_MAX]
    rows, notes = _Rows(nodes), []
    if rows.is_collapsed:
        notes.append(
            f"More than {WORKER_ROWS_MAX} workers: those of a node share a row, which shows the worst of them."
        )
    if len(nodes) < len(story.nodes):
        notes.append(f"{len(story.nodes) - len(nodes)} more nodes are not drawn.")
    length = max(story.length_s, 1e-6)
    boxes = [(agent_boxes(node), worker_boxes(node, is_collapsed=rows.is_collapsed)) for node in nodes]
    folded, shortest = fold_all(boxes, length)
    if shortest:
        notes.append(f"Neighbouring blocks shorter than {duration(shortest)} are drawn as one: there are too many.")
    scale = PLOT_WIDTH / length
    plot = [_grid(rows.height, length)]
    plot += [_band(restart, scale, rows.height) for restart in story.restarts]
    labels = []
    marks = [_marks(node) for node in nodes]
    for place, node in enumerate(nodes):
        top = rows.tops[place]
        labels.append(f'<g class="who" data-node="{place}">{_labels(node, rows, top)}</g>')
        agent, workers = folded[place]
        bottom = rows.tops[place + 1] if place + 1 < len(nodes) else rows.height
        plot.append(f'<g class="node" data-name="{safe(node.name)}" data-height="{bottom - top:g}">')
        plot += [_rect(box, scale, top + 1, rows.agent - 3) for box in agent]
        for row, line in enumerate(workers):
            y = top + rows.agent + row * rows.worker
            height = rows.worker - (2 if rows.worker > 6 else 1)
            has_starts = any(box.classes.startswith("start") for box in line)
            strip = START_PART * height if has_starts else 0.0  # along the lower edge, below the words
            for box in line:
                if box.classes.startswith("start"):
                    plot.append(_rect(box, scale, y + 0.5 + height - strip, strip))
                else:
                    plot.append(_rect(box, scale, y + 0.5, height, strip))
        plot += [_mark(mark, scale, rows, top) for mark in marks[place]]
        plot.append("</g>")
    height = FLAGS_HEIGHT + AXIS_HEIGHT + rows.height
    over = HEAT_TOP if story.restarts else 0
    head = (
        f'<svg id="chart" viewBox="0 {-over} {WIDTH} {height + over + 8:g}" role="img" '
        'aria-label="What each agent and each worker did, over time" '
        f'data-length="{length:.6f}" data-left="{LEFT}" data-width="{PLOT_WIDTH}">'
    )
    y = FLAGS_HEIGHT + AXIS_HEIGHT
    crowded = " crowded" if len(story.restarts) > LINES_MAX else ""
    # Wider than the plot: a number in the middle of its first or last moment is seen as a whole.
    room = PLOT_WIDTH + 28
    above = f'<svg class="above" x="{LEFT - 14}" y="0" width="{room}" height="{y}" viewBox="-14 0 {room} {y}">'
    parts = [
        head, _heat(story.restarts, length), *labels, above, _flags(story.restarts, scale), _axis(length), "</svg>",
        f'<svg class="plot{crowded}" x="{LEFT}" y="{y}" width="{PLOT_WIDTH}" height="{rows.height:g}">',
        f'<rect class="ground" width="{PLOT_WIDTH}" height="{rows.height:g}"/>',
        *plot,
        f'<rect id="chosen" height="{rows.height:g}" width="0"/></svg></svg>',
    ]  # fmt: skip
    kinds = {mark.kind for line in marks for mark in line}
    return Chart("\n".join(parts), tuple(notes), tuple(_GLYPHS[kind] for kind in _GLYPHS if kind in kinds))


def _rect(box: Box, scale: float, y: float, height: float, below: float = 0.0) -> str:
    """A block with its words, which stand above what covers so much of its lower edge."""
    known = box.end if box.known_until is None else box.known_until
    title = f"<title>{safe(box.title)}</title>"
    parts = []
    if known > box.start or box.end <= known:
        parts.append(_span(f"block {box.classes}", box.start, known, scale, y, height, title, box.data))
    if box.end > known:
        parts.append(_span(f"block {box.classes} guess", known, box.end, scale, y, height, title))
    label = box.label
    if label and height > 12:
        kind = "guess" if box.end - known > known - box.start else box.classes.split()[1]
        width = len(label) * _LETTER_WIDTH + 8
        room = (box.end - box.start) * scale
        hidden = "" if room >= width else ' display="none"'
        parts.append(
            f'<text class="in {kind}" data-s="{box.start:.6f}" data-e="{box.end:.6f}" '
            f'data-w="{width:.0f}" x="{box.start * scale + 5:.2f}" y="{y + height / 2 + 4 - below * 0.75:g}"{hidden}>'
            f"{safe(label)}</text>"
        )
    return "".join(parts)


def _span(
    classes: str, start: float, end: float, scale: float, y: float, height: float, inside: str, data: str = ""
) -> str:
    width = max((end - start) * scale - BLOCK_GAP, BLOCK_WIDTH_MIN)
    return (
        f'<rect class="{classes}" {data} data-s="{start:.6f}" data-e="{end:.6f}" x="{start * scale:.2f}" y="{y:g}" '
        f'width="{width:.2f}" height="{height:g}">{inside}</rect>'
    )


# Marks and restarts.


def _marks(node: NodeStory) -> list[Mark]:
    failures = [
        Mark(life.end, "failure", f"rank {life.rank} failed on {node.name}: {life.headline}", life.local_rank)
        for life in node.lives
        if life.outcome == "failed"
    ]
    return [*node.marks, *failures]


def _mark(mark: Mark, scale: float, rows: _Rows, top: float) -> str:
    y = top + rows.agent / 2
    if mark.local_rank is not None:
        y = top + rows.agent + rows.worker * (0.5 if rows.is_collapsed else mark.local_rank + 0.5)
    words = f"{mark.text}\n{duration(mark.at)}"
    title = f"<title>{safe(words)}</title>"
    place = f'data-s="{mark.at:.6f}" data-y="{y:g}" transform="translate({mark.at * scale:.2f} {y:g})"'
    if mark.kind == "failure":
        r = 6 if rows.worker > 12 else 4 if rows.worker > 6 else 3
        cross = r * 0.45
        # Within the block that ended with the failure: the next one begins at once.
        inside = (
            f'<g transform="translate({-r} 0)"><circle r="{r}"/><path d="M{-cross:.2f} {-cross:.2f}L{cross:.2f} '
            f'{cross:.2f}M{-cross:.2f} {cross:.2f}L{cross:.2f} {-cross:.2f}"/></g>'
        )
    else:
        inside = f'<text y="4">{_GLYPHS[mark.kind][0]}</text>'
    return f'<g class="mark {mark.kind.replace(" ", "-")}" {place}>{inside}{title}</g>'


def _band(restart: Restart, scale: float, height: float) -> str:
    title = f"<title>{safe(restart_words(restart))}</title>"
    band = _span("restart", restart.start, restart.end, scale, 0, height, title, f'data-number="{restart.number}"')
    x = restart.start * scale
    line = f'<line class="restart-line" data-s="{restart.start:.6f}" x1="{x:.2f}" x2="{x:.2f}" y2="{height:g}"/>'
    return band + line


def restart_words(restart: Restart) -> str:
    """What a restart was, in a few lines."""
    after = "" if restart.is_over else ", and not all workers ran again"
    text = f"Restart {restart.number}: {duration(restart.took_s)}{after}"
    return f"{text}\n{restart.culprit or restart.reason}"


def _flags(restarts: Sequence[Restart], scale: float) -> str:
    """The numbers of the restarts; where there is no room, one for several.  As the script has it."""
    groups: list[_Flag] = []
    for restart in restarts:
        flag = _Flag(restart.start * scale, restart.number, restart.number)
        while groups and flag.left < groups[-1].left + groups[-1].width + 2:
            before = groups.pop()
            flag = _Flag(before.x, before.first, flag.last)
        groups.append(flag)
    shown = {flag.first: flag for flag in groups}
    parts = ['<g class="flags">']
    for restart in restarts:
        flag = shown.get(restart.number, _Flag(0.0, restart.number, restart.number))
        hidden = "" if restart.number in shown else ' display="none"'
        title = f"<title>{safe(restart_words(restart))}</title>"
        parts.append(
            f'<g class="flag" data-s="{restart.start:.6f}" data-number="{restart.number}"{hidden} '
            f'transform="translate({flag.left:.2f} 12)">{title}'
            f'<rect y="-9" width="{flag.width:g}" height="18" rx="9"/>'
            f'<text x="{flag.width / 2:g}" y="4">{flag.text}</text></g>'
        )
    return "".join([*parts, "</g>"])


@dataclass(frozen=True, slots=True)
class _Flag:
    """The numbers of one or several restarts."""

    x: float  # of the first of them
    first: int
    last: int

    @property
    def text(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}–{self.last}"

    @property
    def width(self) -> float:
        return max(18.0, 9 + len(self.text) * 6.7)

    @property
    def left(self) -> float:
        return min(self.x - 9, PLOT_WIDTH + 13 - self.width)


def _heat(restarts: Sequence[Restart], length: float) -> str:
    """A strip of the whole run, with a bar for each part of it: the higher, the more of it went to restarts."""
    if not restarts:
        return ""
    part = length / HEAT_PARTS
    lost, counts = [0.0] * HEAT_PARTS, [0] * HEAT_PARTS
    for restart in restarts:
        first, last = (min(int(at / part), HEAT_PARTS - 1) for at in (restart.start, restart.end))
        counts[first] += 1
        for place in range(first, last + 1):
            lost[place] += max(0.0, min(restart.end, (place + 1) * part) - max(restart.start, place * part))
    most, width = max(*lost, 1e-9), PLOT_WIDTH / HEAT_PARTS
    bars = []
    for place, seconds in enumerate(lost):
        if seconds > 0:
            height = max(2.0, HEAT_HEIGHT * seconds / most)
            words = (
                f"{duration(place * part)} + {duration(part)}\n{counts[place]} restarts began, {duration(seconds)} lost"
            )
            bars.append(
                f'<rect class="heat" data-from="{place * part:.6f}" data-to="{(place + 1) * part:.6f}" '
                f'x="{place * width:.2f}" y="{HEAT_HEIGHT - height:.2f}" width="{width - 0.6:.2f}" '
                f'height="{height:.2f}"><title>{safe(words)}</title></rect>'
            )
    return (
        f'<text class="rank" x="{LEFT - 8}" y="{HEAT_HEIGHT - HEAT_TOP - 4}">time lost</text>'
        f'<svg class="heats" x="{LEFT}" y="{-HEAT_TOP}" width="{PLOT_WIDTH}" height="{HEAT_HEIGHT}">'
        f'<rect class="ground" width="{PLOT_WIDTH}" height="{HEAT_HEIGHT}"/>{"".join(bars)}'
        f'<rect id="window" height="{HEAT_HEIGHT}" width="0"/></svg>'
    )


# Around them.


def _ticks(length: float) -> list[float]:
    step = next((step for step in _TICKS_S if length / step <= TICKS_MAX), length / TICKS_MAX)
    return [place * step for place in range(int(length / step) + 1)]


def _tick_label(seconds: float, step: float) -> str:
    """As the script has it."""
    if step >= 60:
        minutes = round(seconds / 60)
        return f"{minutes // 60}:{minutes % 60:02d} h" if step >= 3600 or minutes >= 60 else f"{minutes} min"
    digits = max(0, math.ceil(-math.log10(step) - 1e-9))
    if seconds < 60:
        return f"{round(seconds, digits):g} s"
    rest = f"{seconds % 60:0{digits + 3 if digits else 2}.{digits}f}"
    hours, minutes = int(seconds // 3600), int(seconds % 3600 // 60)
    return f"{hours}:{minutes:02d}:{rest}" if hours else f"{minutes}:{rest} min"


def _axis(length: float) -> str:
    ticks = _ticks(length)
    step = ticks[1] if len(ticks) > 1 else length
    scale = PLOT_WIDTH / length
    y = FLAGS_HEIGHT + AXIS_HEIGHT - 7
    labels = []
    for tick in ticks:
        x = tick * scale
        anchor = "start" if x < 8 else "end" if x > PLOT_WIDTH - 24 else "middle"
        labels.append(f'<text x="{x:.2f}" y="{y}" text-anchor="{anchor}">{_tick_label(tick, step)}</text>')
    return f'<g class="axis" data-y="{y}">{"".join(labels)}</g>'


def _grid(height: float, length: float) -> str:
    scale = PLOT_WIDTH / length
    lines = [f'<line x1="{t * scale:.2f}" x2="{t * scale:.2f}" y2="{height:g}"/>' for t in _ticks(length)]
    return f'<g class="grid" data-height="{height:g}">{"".join(lines)}</g>'


def _labels(node: NodeStory, rows: _Rows, top: float) -> str:
    y = FLAGS_HEIGHT + AXIS_HEIGHT + top
    size = min(12.0, rows.agent - 0.5)
    name = node.name if len(node.name) <= NAME_CHARS_MAX else f"{node.name[: NAME_CHARS_MAX - 1]}…"
    full = f"<title>{safe(f'{node.name}, agent {node.pid}')}</title>"
    middle = y + (rows.agent - 1) / 2 + size * 0.35  # where a line of text stands that is centred on the row
    parts = [f'<text class="name" x="4" y="{middle:.2f}" style="font-size:{size:g}px">{safe(name)}{full}</text>']
    if rows.worker < 10:
        return "".join(parts)
    y += rows.agent
    size = min(11.0, rows.worker - 1)
    lines = (
        [f"{node.workers} workers"] if rows.is_collapsed else [_rank_label(node, row) for row in range(node.workers)]
    )
    for row, line in enumerate(lines):
        parts.append(
            f'<text class="rank" x="{LEFT - 8}" y="{y + (row + 0.5) * rows.worker + size * 0.34:.2f}" '
            f'style="font-size:{size:g}px">{line}</text>'
        )
    return "".join(parts)


def _rank_label(node: NodeStory, local_rank: int) -> str:
    ranks = node.ranks_of(local_rank)
    match len(ranks):
        case 1:
            return f"rank {ranks[0]}"
        case 2 | 3:
            return f"rank {' → '.join(map(str, ranks))}"
        case _:
            return f"local rank {local_rank}"
