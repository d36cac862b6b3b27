"""What a node knows of the job's log, in the terms of `docs/explanation/rendezvous.md`, for its log and `status`."""

from __future__ import annotations

from aelastic.base.record import Record
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.cause import listed
from aelastic.rdzv.leader.job_state import JobState, state_in
from aelastic.rdzv.log.entries import Entry, id_of
from aelastic.rdzv.log.node import Node

NAMES_MAX = 8  # in a line


class Agreed(Record):
    """The last entry that a node knows to be committed.

    Args:
        term: the term of the leader that the node follows.
        entry: its number.
        voters: ids of the nodes that vote on the next one; `None`: this node has no vote, and does not know.
        endpoint_votes: whether the endpoint also votes, or decides alone.
        text: all of this in one line.
    """

    term: int
    entry: int
    voters: tuple[str, ...] | None
    endpoint_votes: bool | None
    text: str


def agreed(node: Node) -> Agreed | None:
    """Returns what a node knows; `None` before the first entry."""
    entry, entry_id = node.committed, id_of(node.committed)
    if entry_id is None:
        return None
    text = f"entry {entry_id.number} of term {entry_id.term} is committed"
    if not isinstance(entry, Entry):
        return Agreed(node.term, entry_id.number, None, None, text)
    state = state_in(entry) if entry.payload else JobState()
    voters, names = _voters(entry, state)
    if state.verdict is not None:
        text = f"{text}, the verdict: {wording.text_of(state.verdict.decision)}"
    elif state.last_round is not None:
        votes = _who_votes(names, endpoint_votes=bool(entry.incarnations))
        text = f"{text}, round {state.last_round.number}; {votes}"
    return Agreed(node.term, entry_id.number, voters, bool(entry.incarnations), text)


def _voters(entry: Entry, state: JobState) -> tuple[tuple[str, ...], list[str]]:
    """Returns the node ids, and what a person calls the nodes."""
    participants = () if state.last_round is None else state.last_round.participants
    voters = [each for each in participants if each.name in entry.voters]
    hosts = [each.host for each in voters]
    node_ids = [each.node_id for each in voters]
    return tuple(node_ids), hosts if len(set(hosts)) == len(hosts) else node_ids


def _who_votes(names: list[str], *, endpoint_votes: bool) -> str:
    if not names:
        return "the endpoint alone votes"
    shown = listed(names[:NAMES_MAX], len(names))
    return f"{shown} and the endpoint vote" if endpoint_votes else f"{shown} vote"
