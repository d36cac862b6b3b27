"""One chain of events, from what set it off to the workers that run again, over all nodes.

The records of a chain have the same stimulus (`observe.stimuli`).  Clocks of hosts differ by a few milliseconds, and so
does the order of what happens on two hosts at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aelastic.observe.status_text import counted
from aelastic.tools.timeline.reader import Entry, Log

HOSTS_MAX = 4  # in a line


class Link(NamedTuple):
    """One thing that happened, on one host or on several."""

    at: float  # seconds since the epoch, on the first host
    until: float  # on the last one
    text: str
    hosts: tuple[str, ...]

    @property
    def where(self) -> str:
        """The hosts, as a line takes them."""
        more = len(self.hosts) - HOSTS_MAX
        return ", ".join(self.hosts[:HOSTS_MAX]) + (f" and {counted(more, 'more host')}" if more > 0 else "")


def chains_of(logs: Sequence[Log], offsets: Sequence[float]) -> dict[str, list[Link]]:
    """Returns the chain of each stimulus, in order.

    Args:
        logs: of all nodes.
        offsets: of their clocks, in seconds (`offsets_of`).
    """
    found: dict[str, dict[str, list[tuple[float, str]]]] = {}
    for log, offset in zip(logs, offsets, strict=True):
        for entry in log.entries:
            stimulus = entry.text("stimulus")
            for at, text in _links(entry) if stimulus else ():
                found.setdefault(stimulus, {}).setdefault(text, []).append((at - offset, entry.text("host")))
    return {stimulus: _in_order(texts) for stimulus, texts in found.items()}


def as_json(chain: Sequence[Link]) -> list[dict[str, Any]]:
    """Returns a chain for JSON, with times since its beginning."""
    return [
        {
            "after_s": round(each.at - chain[0].at, 6),
            "until_s": round(each.until - chain[0].at, 6),
            "text": each.text,
            "hosts": list(each.hosts),
            "where": each.where,
        }
        for each in chain
    ]


def _in_order(texts: dict[str, list[tuple[float, str]]]) -> list[Link]:
    links = [
        Link(min(places)[0], max(places)[0], text, tuple(dict.fromkeys(host for _, host in sorted(places))))
        for text, places in texts.items()
    ]
    return sorted(links)


# What a record of a kind says, with its fields.
_TEXTS = {
    "noticed": "rank {rank}: {reason}",
    "announced": "{text}",
    "stop_asked": "the agent was asked to stop",
    "restarting": "decided: {reason}",
    "job_ended": "decided: {reason}",
    "killed": "workers were killed: {reason}",
    "round_formed": "round {round} is complete",
    "workers_started": "workers have started",
    "recovered": "workers have the state",
    "run_ended": "the run ended",
}


def _links(entry: Entry) -> Iterable[tuple[float, str]]:
    """Yields when something happened that the record shows, and what; nothing if the record is damaged."""
    with suppress(ValueError, KeyError):
        match entry.kind, entry.text("name") or entry.text("outcome"):
            case "phase_took", "detect":
                yield entry.wall - entry.seconds("duration_s"), f"rank {entry.number('rank')} exited"
            case "phase_took", "stop":
                yield entry.wall, "workers have stopped"
            case "worker_ended", "failed":
                yield entry.wall, f"it is known why rank {entry.number('rank')} exited"
            case kind, _ if kind in _TEXTS:
                yield entry.wall, _TEXTS[kind].format_map(entry.fields)
            case _:
                pass
