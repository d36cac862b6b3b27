"""Timelines of invented logs, and a reader of the page that shows them."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from typing import Any

from aelastic.tools.timeline.merge import timeline_from
from aelastic.tools.timeline.model import Timeline
from aelastic.tools.timeline.reader import Log, read_logs
from kit import decided
from kit.stories.event_logs import NodeLog


def logs_of(*nodes: NodeLog) -> list[Log]:
    return [log for node in nodes for log in read_logs(node.host, node.lines)]


def story_of(*nodes: NodeLog) -> Timeline:
    return timeline_from(logs_of(*nodes))


def changed(line: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(line), **fields}).encode() + b"\n"


HOSTILE = "<script>alert(1)</script>\"'&\x1b[31m\x00\u202eevil\ud800 ]]>-->"


class Elements(HTMLParser):
    """Every element of a page, with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, {name: value or "" for name, value in attrs}))

    def of(self, *classes: str) -> list[dict[str, str]]:
        return [attrs for _, attrs in self.found if set(classes) <= set(attrs.get("class", "").split())]


def data_of(page: str) -> dict[str, Any]:
    """The data that a page holds for its script to draw."""
    (text,) = re.findall(r'<script type="application/json" id="data">([^<]*)</script>', page)
    found: dict[str, Any] = json.loads(text)
    return found


def boxes_of(data: dict[str, Any], *classes: str) -> list[dict[str, Any]]:
    """The boxes of all rows that have these classes, row by row."""
    rows = [row for node in data["nodes"] for row in (node["agent"], *node["workers"])]
    return [box for row in rows for box in row if set(classes) <= set(box["classes"].split())]


def many_restarts(count: int, *, workers: int = 2) -> NodeLog:
    a = NodeLog("node-a", workers=workers)
    a.formed(1.0, 1, 0, nodes=1)
    a.started(1.1)
    for place in range(count):
        a.fails(10.0 * place + 9.0, 0, f"failure {place}", known_at=10.0 * place + 9.001)
        a.restarting(10.0 * place + 9.01, decided.restart(), restarts=place + 1)
        a.stopped(10.0 * place + 9.1, *range(1, workers))
        a.formed(10.0 * place + 9.2, place + 2, 0, nodes=1, restarts=place + 1)
        a.started(10.0 * place + 9.3 + place * 0.001)
    a.succeeds(10.0 * count + 9.0, ends=10.0 * count + 9.1)
    return a


def cold_and_warm() -> NodeLog:
    """Workers that start cold, fail, and start warm."""
    a = NodeLog("node-a")
    a.formed(1.0, 1, 0, nodes=1)
    a.started(1.1)
    a.reached(6.2, 0, "output", 5.0, "cold")
    a.reached(6.2, 1, "process_group", 5.5, "cold")
    a.fails(10.0, 0, "RuntimeError", known_at=10.0)
    a.restarting(10.1, decided.restart())
    a.stopped(10.2, 1)
    a.formed(10.3, 2, 0, nodes=1, restarts=1)
    a.started(10.35, is_warm=True)
    for local_rank in range(2):
        a.reached(10.6, local_rank, "output", 0.2 + local_rank / 10, "warm")
    a.succeeds(20.0, ends=20.0)
    return a
