"""Timelines of made-up logs, and a reader of the page that shows them."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

from aelastic.timeline.merge import tell_story
from aelastic.timeline.model import Story
from aelastic.timeline.reader import Log, read_logs
from kit.stories.event_logs import NodeLog


def logs_of(*nodes: NodeLog) -> list[Log]:
    return [log for node in nodes for log in read_logs(node.host, node.lines)]


def story_of(*nodes: NodeLog) -> Story:
    return tell_story(logs_of(*nodes))


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


def many_restarts(count: int, *, workers: int = 2, host: str = "node-a") -> NodeLog:
    a = NodeLog(host, workers=workers)
    a.formed(1.0, 1, 0, nodes=1)
    a.started(1.1)
    for place in range(count):
        a.fails(10.0 * place + 9.0, 0, f"failure {place}", known_at=10.0 * place + 9.001)
        a.told(10.0 * place + 9.01, "a worker failed", restarts=place + 1)
        a.stopped(10.0 * place + 9.1, *range(1, workers))
        a.formed(10.0 * place + 9.2, place + 2, 0, nodes=1, restarts=place + 1)
        a.started(10.0 * place + 9.3 + place * 0.001)
    a.succeeds(10.0 * count + 9.0, ends=10.0 * count + 9.1)
    return a
