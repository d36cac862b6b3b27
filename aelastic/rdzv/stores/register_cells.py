"""The cell that each store of a quorum keeps in its one key, and its bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from aelastic.base.record import Record

# The first word of a cell.  A store that is the only endpoint keeps a JSON list instead (`endpoint_cell.py`).
MARK = b"quorum "


class Ballot(NamedTuple):
    """The number of one try to write: no two are the same, and a later one is above all that it has seen."""

    number: int
    name: str  # of the client


class Vote(Record):
    """A text that a try has written, and the incarnations of the stores that count for a majority from then on."""

    ballot: Ballot
    members: tuple[Ballot | None, ...]  # each store's incarnation, in the order of the endpoints; `None`: not a member
    text: bytes


class StoreCell(Record):
    """The content of one store.

    Args:
        incarnation: the ballot of the try that included the store; one that forgets everything begins a new one.
        promised: the newest try that has locked this cell.
        vote: the newest vote written here.
    """

    incarnation: Ballot
    promised: Ballot
    vote: Vote | None = None


def cell_to_bytes(cell: StoreCell, endpoints: Sequence[str]) -> bytes:
    vote = cell.vote
    head = [endpoints, cell.incarnation, cell.promised, vote and vote.ballot, vote and vote.members]
    return MARK + json.dumps(head).encode() + b"\n" + (vote.text if vote else b"")


def cell_from_bytes(data: bytes) -> tuple[StoreCell, list[str]]:
    """Returns a cell, and the endpoints of the agent that wrote it.

    Raises:
        ValueError: this was not written by an agent with several endpoints.
    """
    head, _, text = data.partition(b"\n")
    if not head.startswith(MARK):
        raise ValueError("an agent with another list of endpoints wrote it")
    try:
        endpoints, incarnation, promised, ballot, members = json.loads(head.removeprefix(MARK))
        if not all(isinstance(each, str) for each in endpoints):
            raise ValueError("endpoints are not text")
        vote = ballot and Vote(_ballot(ballot), tuple(each and _ballot(each) for each in members), text)
        return StoreCell(_ballot(incarnation), _ballot(promised), vote), endpoints
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _ballot(value: object) -> Ballot:
    match value:
        case [int(number), str(name)]:
            return Ballot(number, name)
        case _:
            raise ValueError("no ballot")
