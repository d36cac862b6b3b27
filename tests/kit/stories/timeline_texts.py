"""Stories of timelines as text: what the agents of a job write to their event logs, and the resulting timeline.

The first line names the nodes, each with the arguments of `NodeLog`.  Each further line is a time, a node, and the event:
a method of `NodeLog` with its arguments, where `_` means a space.  The timeline follows the last line: for each node its
blocks, marks and the incarnations of its workers, then the restarts with each node's share, how the time was spent, the notes,
and how the run ended.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

from aelastic.observe import run_events as ev
from aelastic.rdzv.decisions.decision import Decision
from aelastic.tools.timeline.model import NodeTimeline, Restart, Timeline
from aelastic.workers.states import Phase, WorkerState
from kit import decided
from kit.stories import files
from kit.stories.event_logs import NodeLog
from kit.stories.files import Story
from kit.stories.timelines import story_of

FOLDER = files.FOLDER / "timelines"
PARTS = ("detect", "stop", "await", "rendezvous", "spawn")


def value_of(text: str) -> Any:
    if text in Phase.__members__:
        return Phase[text]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text.replace("_", " ")


def arguments_of(words: list[str]) -> tuple[list[Any], dict[str, Any]]:
    named = {key: value_of(value) for key, is_named, value in (word.partition("=") for word in words) if is_named}
    return [value_of(word) for word in words if "=" not in word], named


def event_of(words: list[str]) -> ev.RunEvent | None:
    """An event without a method of its own."""
    kind, *given = words
    values, named = arguments_of(given)
    match kind:
        case "noticed":
            return ev.Noticed(*values, **named)
        case "waited":
            return ev.Waited(*values)
        case "asked":
            return ev.StopAsked(*values)
        case "progressed":
            return ev.Progressed(*values, **named)
        case "ended":
            return ev.WorkerEnded(*values)
        case "over":
            return ev.RunEnded(WorkerState[words[1]], *values[1:])
        case _:
            return None


def decision_of(text: str) -> Decision:
    """`failed:2:node-b`, `lost:node-b` or `joined:node-b`."""
    kind, *what = text.split(":")
    match kind:
        case "failed":
            return decided.restart(1, 3, decided.failed(int(what[0]), what[1]))
        case "lost":
            return decided.lost(what[0], "silent for 5 s")
        case _:
            return decided.joined(what[0])


def add(node: NodeLog, at: float, words: list[str]) -> None:
    event = event_of(words)
    if event is not None:
        node.add(at, event)
        return
    verb, *given = words
    values, named = arguments_of(given)
    if verb == "restarting":
        values[0] = decision_of(values[0])
    getattr(node, verb)(at, *values, **named)


def played(story: Story) -> list[str]:
    nodes = dict[str, NodeLog]()
    for each in story.rules.split("; "):
        host, *options = each.split()
        nodes[host] = NodeLog(host, **arguments_of(options)[1])
    lines = [line for line in story.lines if not line.startswith("  ")]
    for line in lines:
        at, name, *words = line.split()
        add(nodes[name], float(at), words)
    return [*lines, *(f"  {text}".rstrip() for text in texts_of(story_of(*nodes.values())))]


def span(start: float, end: float) -> str:
    return f"{round(start, 3) + 0.0:.3f} to {end:.3f} s"  # not -0.000


def texts_of(timeline: Timeline) -> Iterator[str]:
    for node in timeline.nodes:
        yield from _node(node)
    for restart in timeline.restarts:
        yield from _restart(restart)
    spent = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in timeline.spent.items() if round(seconds, 3))
    yield f"spent: {spent}; {timeline.length_s:.3f} s in all"
    yield from (f"note: {note}" for note in timeline.notes)
    if not timeline.is_training_known:
        yield "it is not known whether workers have trained"
    yield f"{timeline.state}: {timeline.reason}" if timeline.state else "no agent saw the end"


def _node(node: NodeTimeline) -> Iterator[str]:
    gone = f", gone by {node.gone_by:.3f} s" if node.closing == "unknown" else ""
    yield f"{node.name}: {span(node.begins, node.ends)}, {node.closing}{gone}"
    for block in node.blocks:
        yield f"  {block.name} {span(block.start, block.end)}" + ", open" * block.is_open
    for mark in node.marks:
        yield f"  {mark.kind}: {mark.text}"
    for process in sorted(node.incarnations, key=lambda each: (each.generation, each.local_rank)):
        headline = f", known at {process.known_at:.3f} s: {process.headline}" if process.headline else ""
        progress = f", {process.progress}" if process.progress else ""
        yield f"  rank {process.rank} {span(process.start, process.end)}, {process.outcome}{headline}{progress}"


def _restart(restart: Restart) -> Iterator[str]:
    over = "" if restart.is_over else ", not over"
    rounds = f"round {restart.round} to {restart.next_round}"
    yield f"restart {span(restart.start, restart.end)}{over}, {restart.cause}, {rounds}: {restart.culprit or restart.reason}"
    for share in restart.shares:
        parts = ", ".join(f"{name} {share.spent(name):.3f} s" for name in PARTS)
        yield f"  {share.node}: {parts}; {share.total:.3f} s"
