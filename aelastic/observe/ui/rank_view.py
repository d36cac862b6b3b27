"""A view of nodes and ranks instead of the status line: this node's workers, and what is known about the others.

rich lays it out as rows of text; `status_line.py` draws them.  rich is imported when the first are made, in the thread
that draws.  The state is copied before, because the run continues meanwhile.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from aelastic.base.host.kernel_states import WORDS
from aelastic.base.host.process_states import ProcessStates
from aelastic.base.host.usage import usage_of
from aelastic.logs.terminal import LIVE_SHARE
from aelastic.observe.run_state import WorkerNow
from aelastic.observe.status_text import Frame, Picture, StatusText, cut, fitted

if TYPE_CHECKING:
    from rich.table import Table

# How often the workers' CPU and memory are read.  Reading and drawing eight takes some 5 ms.
INTERVAL_S = 2.0

# Rows above the ranks: the title, the node, a heading.
ROWS_ABOVE = 3
# A reason is a sentence; all of it is in the log.
NOTE_COLUMNS = 60
_HEADINGS = ("rank", "local", "pid", "state", "CPU", "memory")
_STYLES = {"starting": "cyan", "running": "green", "stopped": "yellow", "failed": "red"}
_MIB = 1 << 20


class RankView:
    """Draws the frames of the view.

    Args:
        text: the state of the run, in words.
    """

    def __init__(self, text: StatusText) -> None:
        self._text = text
        self._used: dict[int, tuple[float, float]] = {}  # pid to CPU time, and when that was
        self._process_states = ProcessStates()

    def frame(self, now: float, columns: int, rows: int) -> Frame:
        picture = self._text.picture(now)
        key = picture, columns, rows, now // INTERVAL_S
        return Frame(key, lambda: self.rows(picture, now, columns - 1, rows // LIVE_SHARE))

    def changes_at(self, now: float) -> float:
        return (now // INTERVAL_S + 1) * INTERVAL_S

    def rows(self, picture: Picture, now: float, columns: int, most: int) -> list[bytes]:
        """Returns at most `most` rows, none wider than the columns."""
        from rich.console import Console
        from rich.text import Text

        drawn = io.StringIO()
        console = Console(file=drawn, width=columns, force_terminal=True, highlight=False, markup=False, emoji=False)
        above = [(fitted(picture.title, picture.spare, columns), "bold"), (picture.node, "")]
        rest = (picture.endpoints, ""), (picture.failure, "red"), (picture.took, "dim")
        below = [(words, style) for words, style in rest if words]
        room = max(0, most - ROWS_ABOVE - len(below))
        shown = picture.ranks if len(picture.ranks) <= room else _chosen(picture.ranks, room - 1)
        if shown != picture.ranks:
            below.insert(0, (f"and {len(picture.ranks) - len(shown)} ranks more", "dim"))
        for words, style in above:
            console.print(Text(cut(words, columns), style))
        if shown:
            console.print(self._table(shown, now))
        for words, style in below:
            console.print(Text(cut(words, columns), style))
        return [row.encode() for row in drawn.getvalue().splitlines()[: max(1, most)]]

    def _table(self, ranks: Sequence[WorkerNow], now: float) -> Table:
        from rich.table import Table
        from rich.text import Text

        self._used = {each.pid: self._used[each.pid] for each in ranks if each.pid in self._used}
        table = Table(box=None, pad_edge=False, header_style="dim")
        for heading in _HEADINGS:
            table.add_column(heading, no_wrap=True, justify="left" if heading == "state" else "right")
        kernel = self._process_states.look({each.rank: each.pid for each in ranks if each.state == "running"}, now)
        for each in ranks:
            halted = WORDS[kernel[each.rank]] if each.rank in kernel else ""
            words = cut(": ".join(filter(None, [halted or each.state, each.note])), NOTE_COLUMNS)
            cpu, memory = self._usage(each, now)
            state = Text(words, _STYLES.get("stopped" if halted else each.state, ""))
            table.add_row(str(each.rank), str(each.local_rank), str(each.pid or ""), state, cpu, memory)
        return table

    def _usage(self, rank: WorkerNow, now: float) -> tuple[str, str]:
        """Returns a worker's CPU since the last picture, in percent of a core, and its memory."""
        pid = rank.pid
        usage = usage_of(pid, session=pid) if pid is not None and rank.state == "running" else None
        if usage is None or pid is None:
            return "", ""
        cpu_s, at = self._used.get(pid, (usage.cpu_s, now))
        self._used[pid] = usage.cpu_s, now
        cpu = f"{(usage.cpu_s - cpu_s) / (now - at):.0%}" if now > at else ""
        return cpu, f"{usage.rss_bytes / _MIB:.0f} MiB"


def _chosen(ranks: Sequence[WorkerNow], most: int) -> Sequence[WorkerNow]:
    """Returns the ranks to show; if there are too many, those that do not simply run come first."""
    first = sorted(ranks, key=lambda each: each.state == "running" and not each.note)[: max(0, most)]
    return sorted(first, key=lambda each: each.rank)
