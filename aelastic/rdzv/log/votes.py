"""Who decides: the weights of votes, when an ended node still counts, and recovery.

A configuration with n voters and one endpoint has 2n + 1 votes: two for each node, and one for the endpoint, which
breaks ties.  More than half of them decide.  Because nothing is on disk, a process that ends would take its vote with
it.  By rules 5a, 5b and 5c its last vote still counts, because a living node knows all that
the process had accepted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum

from aelastic.base.record import Record
from aelastic.rdzv.log.entries import Configuration, Entry

# In a round with more members, only a few of them vote, because a proposal travels whole to each voter.
ALL_VOTE_MAX = 128
FEW = 7

Nodes = frozenset[str]


class Votes(Record):
    """The votes for one phase, as its leader knows them.

    Args:
        answered: the nodes that have voted themselves.
        ended_followers: those that ended as followers of this leader.
        ended_leaders: those that ended as leaders of it, or of a node that has answered.
        replaced: those that are proven to be gone.
        endpoints: how many have voted, each with the incarnation that the configuration names.
    """

    answered: Nodes
    ended_followers: Nodes
    ended_leaders: Nodes
    replaced: Nodes
    endpoints: int

    @property
    def known(self) -> Nodes:
        return self.answered | self.ended_followers | self.ended_leaders


class Mandate(IntEnum):
    """The ground on which a leader may propose, the best last."""

    NONE = 0
    FOUNDING = 1  # no log can continue: the endpoints decide how a new one begins
    RECOVERY = 2  # every node but those that answered is gone, and the endpoint remembers
    QUORUM = 3  # what an earlier leader of this log may have committed is known


def mandate(configuration: Configuration, votes: Votes) -> Mandate:
    """Returns what these votes allow in this configuration."""
    if is_more_than_half(configuration, votes.answered, votes.endpoints):
        return Mandate.QUORUM
    if not configuration.voters:
        return Mandate.NONE  # the endpoints vote alone: they remember, and nothing can replace them
    if (
        by_ended_followers(configuration, votes)
        or by_ended_leaders(configuration, votes)
        or by_all(configuration, votes)
    ):
        return Mandate.QUORUM
    return Mandate.RECOVERY if by_recovery(configuration, votes) else Mandate.NONE


def is_more_than_half(configuration: Configuration, nodes: Nodes, endpoints: int) -> bool:
    """Quorum: more than half of all votes; a node has two, an endpoint one."""
    total = 2 * len(configuration.voters) + len(configuration.incarnations)
    return 2 * (2 * len(nodes.intersection(configuration.voters)) + endpoints) > total


def has_living_node(configuration: Configuration, votes: Votes) -> bool:
    """Someone must live: each quorum needs one living node of the configuration, or those that ended decide alone.

    Because only voters speak for a leader that ended (`node.can_speak_for_leader`), this follows from the other rules,
    and a search finds no harm without it.  It states what the other rules rely on.
    """
    return not votes.answered.isdisjoint(configuration.voters)


def by_ended_followers(configuration: Configuration, votes: Votes) -> bool:
    """Rule 5a: a leader votes on behalf of a follower whose end it has read: it has read all that the follower sent."""
    nodes = votes.answered | votes.ended_followers
    return has_living_node(configuration, votes) and is_more_than_half(configuration, nodes, votes.endpoints)


def by_ended_leaders(configuration: Configuration, votes: Votes) -> bool:
    """Rule 5b: with the endpoint's own vote, a leader counts if one of the quorum has read its end after a plan.

    Several nodes may know what a leader accepted last, so two quorums could each count it.  Hence the endpoint.
    """
    is_enough = is_more_than_half(configuration, votes.known, votes.endpoints)
    return votes.endpoints > 0 and has_living_node(configuration, votes) and is_enough


def by_all(configuration: Configuration, votes: Votes) -> bool:
    """Rule 5c: if all nodes vote or are known to have ended, those that live decide without the endpoint."""
    is_anyone_there = has_living_node(configuration, votes) or votes.endpoints > 0
    return is_anyone_there and not missing(configuration, votes.known)


def by_recovery(configuration: Configuration, votes: Votes) -> bool:
    """Recovery: the endpoint decides with those that live, if every other node has ended or was replaced."""
    return votes.endpoints > 0 and not missing(configuration, votes.known | votes.replaced)


def missing(configuration: Configuration, known: Nodes) -> Nodes:
    """Returns the voters that may live but have not answered."""
    return frozenset(configuration.voters) - known


def is_named(configuration: Configuration, endpoint: int, incarnation: str) -> bool:
    """Incarnation: an endpoint that has lost its memory has no vote until an entry names its new incarnation."""
    return configuration.incarnations[endpoint] == incarnation


def is_within(got: Mandate, phase_1: Mandate) -> bool:
    """Recovery begins with phase 1: phase 2 must not get by with less than the mandate of phase 1."""
    return Mandate.NONE < phase_1 <= got


def gives_new_votes(configuration: Configuration, proposal: Entry) -> bool:
    """New voters go to the endpoint first: whether the proposal gives a vote to a node that had none."""
    return bool(configuration.voters) and not set(proposal.voters).issubset(configuration.voters)


def choose_voters(hosts: Mapping[str, str], before: Iterable[str] = ()) -> tuple[str, ...]:
    """Returns who votes in a round: all members or, if there are more than 128, seven on seven hosts.

    Args:
        hosts: the host of each member.
        before: who votes now.  They remain voters if possible, since a new voter needs the endpoint.
    """
    if len(hosts) <= ALL_VOTE_MAX:
        return tuple(sorted(hosts))
    known = set(before)
    voters: dict[str, str] = {}  # by host
    for name in sorted(hosts, key=lambda name: (name not in known, name)):
        voters.setdefault(hosts[name], name)
    spare = sorted(set(hosts) - set(voters.values()))  # if there are fewer than seven hosts
    return tuple(sorted([*voters.values(), *spare][:FEW]))
