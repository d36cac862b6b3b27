"""Parses a line from the control socket, and checks all of it before anything is done."""

from __future__ import annotations

import json
from typing import Any

from aelastic.base.record import Record
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.sense import COUNT_MAX, NAME_MAX, SECONDS_MAX

LINE_BYTES_MAX = 1 << 16
SAVE_S = 120.0  # how long ranks may take to save, unless the request sets a deadline
QUERIES = ("here", "status", "stacks", "why", "logs")
VERBS = (*QUERIES, *r.Verb)
# Names that commands of an earlier version send.
EARLIER_NAMES = {"exclude": r.Verb.CORDON, "include": r.Verb.UNCORDON}
NO_OBJECT = "a request is a JSON object in one line"


class CommandError(ValueError):
    """A line is not a valid command; the message names the reason."""


class Command(Record):
    """A client's request or query, for the job or for this node."""

    verb: str  # one of `VERBS`
    node: str = ""  # the target of a request, by host or id; empty: this node
    reason: str = ""
    deadline_s: float = SAVE_S
    at_save: bool = False
    wait: bool = False  # for the outcome
    force: bool = False  # drain even if this ends the job
    rank: int = -1  # whose log
    stderr: bool = False
    follow: bool = False


def command_of(line: bytes) -> Command:
    """Parses a line of JSON; unknown fields are ignored.

    Raises:
        CommandError: the line is not a valid command.
    """
    try:
        return _checked(json.loads(line))
    except CommandError:
        raise
    except (ValueError, RecursionError):  # `repr` cannot nest as deep as JSON
        raise CommandError(NO_OBJECT) from None


def _checked(received: Any) -> Command:
    if not isinstance(received, dict):
        raise CommandError(NO_OBJECT)
    verb = _text(received, "verb", NAME_MAX)
    command = Command(
        verb=EARLIER_NAMES.get(verb, verb),
        node=_text(received, "node", NAME_MAX),
        reason=_text(received, "reason", r.REASON_MAX),
        deadline_s=_seconds(received, "deadline_s", SAVE_S),
        at_save=_flag(received, "at_save"),
        wait=_flag(received, "wait"),
        force=_flag(received, "force"),
        rank=_rank(received, "rank"),
        stderr=_flag(received, "stderr"),
        follow=_flag(received, "follow"),
    )
    if command.verb not in VERBS:
        raise CommandError(f"verb is {command.verb!r:.80}: use one of {', '.join(VERBS)}")
    if command.verb == "logs" and command.rank < 0:
        raise CommandError("rank is missing: name the rank whose logs to show")
    return command


def _text(received: dict[str, Any], name: str, most: int) -> str:
    value = received.get(name, "")
    if isinstance(value, str) and len(value) <= most:
        return value
    raise CommandError(f"{name} is {value!r:.80}: use a text of at most {most:,} characters")


def _flag(received: dict[str, Any], name: str) -> bool:
    value = received.get(name, False)
    if isinstance(value, bool):
        return value
    raise CommandError(f"{name} is {value!r:.80}: use true or false")


def _rank(received: dict[str, Any], name: str) -> int:
    value = received.get(name, -1)
    if type(value) is int and -1 <= value <= COUNT_MAX:
        return value
    raise CommandError(f"{name} is {value!r:.80}: use a whole number, at least 0")


def _seconds(received: dict[str, Any], name: str, otherwise: float) -> float:
    value = received.get(name, otherwise)
    if type(value) in {int, float} and 0 <= value <= SECONDS_MAX:  # false for NaN
        return float(value)
    raise CommandError(f"{name} is {value!r:.80}: use seconds, at most {SECONDS_MAX:.0e}")
