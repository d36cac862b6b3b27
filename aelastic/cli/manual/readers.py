"""How the commands read the values of their options; their `ValueError` names the remedy."""

from __future__ import annotations

import re

_PRICE = re.compile(r"\$?(\d+(?:\.\d+)?)/(gpu-|worker-)?h")


def read_count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r}: use a number, at least 1")
    return int(text)


def read_budget(text: str) -> int:
    if not text.isdecimal():
        raise ValueError(f"{text!r}: use a whole number, 0 or more")
    return int(text)


def read_reason(text: str) -> str:
    from aelastic.rdzv.protocol.requests import REASON_MAX

    if len(text) > REASON_MAX:
        raise ValueError(f"use at most {REASON_MAX:,} characters")
    return text


def read_node(text: str) -> str:
    from aelastic.rdzv.protocol.sense import NAME_MAX

    if len(text) > NAME_MAX:
        raise ValueError(f"use a host name or a node id of at most {NAME_MAX} characters")
    return text


def read_price(text: str) -> tuple[float, str]:
    """A price per hour, and what it is for: `gpu-`, `worker-`, or nothing for the job."""
    if (match := _PRICE.fullmatch(text)) is None:
        raise ValueError(f"{text!r}: use a price and its unit, e.g. 2.10/gpu-h, or 12/h for the whole job")
    return float(match[1]), match[2] or ""


def read_metric(text: str) -> re.Pattern[str]:
    """A pattern with a group for a number."""
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a regular expression ({error})") from None
    if not pattern.groups:
        raise ValueError(f"{text!r} has no group for the number: use 'loss (\\S+)'")
    return pattern
