"""What a node reports about the last entry that it knows is committed."""

from __future__ import annotations

import pytest

from aelastic.rdzv.decisions.cause import Cause, CauseKind
from aelastic.rdzv.decisions.decision import Decision, DecisionKind
from aelastic.rdzv.leader.job_state import JobState, payload_of, round_of
from aelastic.rdzv.log.entries import Entry, first_entry, next_entry
from aelastic.rdzv.log.node import Node
from aelastic.rdzv.member.agreed import Agreed, agreed
from aelastic.rdzv.protocol import messages as m

SUCCEEDED = m.Ended(m.Outcome.SUCCEEDED, Decision(DecisionKind.SUCCEEDED, Cause(CauseKind.ALL_SUCCEEDED)))


def entry(hosts: dict[str, str], voters: str, *, incarnations: tuple[str, ...] = ("1f",)) -> Entry:
    """The first entry, for a round with these nodes."""
    nodes = [m.Node(name, host, "default", 1, host, 29500, vote_port=7) for name, host in hosts.items()]
    state = JobState(round_of(1, 5, nodes, nodes[0].node_id))
    return first_entry(5, hosts, list(voters), incarnations, payload_of(state))


@pytest.mark.parametrize("hosts, voters, incarnations, who", [
    ({"a": "n0", "b": "n1"}, "ab", ("1f",), "n0, n1 and the endpoint vote"),
    ({"a": "n0", "b": "n1", "c": "n2"}, "ab", (), "n0, n1 vote"),
    ({"a": "here", "b": "here"}, "ab", ("1f",), "a, b and the endpoint vote"),
    ({"a": "n0", "b": "n1"}, "", ("1f",), "the endpoint alone votes"),
    ({each: each for each in "abcdefghij"}, "abcdefghij", ("1f",), "a, b, c, d, e, f, g, h and 2 more and the endpoint vote"),
])  # fmt: skip
def test_who_votes_is_reported_by_host_or_by_node_where_hosts_repeat(
    hosts: dict[str, str], voters: str, incarnations: tuple[str, ...], who: str
) -> None:
    known = agreed(Node("a", 6, committed=entry(hosts, voters, incarnations=incarnations)))
    text = f"entry 1 of term 5 is committed, round 1; {who}"
    assert known == Agreed(6, 1, tuple(voters), bool(incarnations), text)


def test_a_node_without_a_vote_knows_the_entry_alone() -> None:
    committed = entry({"a": "n0"}, "a")
    assert agreed(Node("s", 6, committed=committed.id)) == Agreed(6, 1, None, None, "entry 1 of term 5 is committed")
    assert agreed(Node("s", 6)) is None


@pytest.mark.words
def test_the_verdict_is_named() -> None:
    first = entry({"a": "n0"}, "a")
    verdict = payload_of(JobState(verdict=SUCCEEDED))
    last = next_entry(first, 6, (), (), ("1f",), is_verdict=True, payload=verdict)
    known = agreed(Node("a", 6, committed=last))
    assert known is not None
    assert known.text == "entry 2 of term 6 is committed, the verdict: every worker succeeded"
