"""The rules of the log, each broken on purpose, and a kind of world in which a search has to notice it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from aelastic.rdzv.log import entries, leader, node, votes
from aelastic.rdzv.log.leader import Leader
from aelastic.rdzv.log.node import Close
from aelastic.rdzv.log.votes import Mandate
from kit.log_search.search import walk
from kit.log_search.world import Move, Setup

Where = tuple[ModuleType, str]


# Moves that fail to come make what is known differ from node to node.
RARE_WRITES = {
    "status": 4, "plan": 3, "closed at leader": 4, "closed at follower": 4, "lease passes": 0.001, "campaign": 0.3,
    "end": 0.3, "lock": 0.3, "write": 0.3, "reset": 0.2, "end by reset": 0.2,
}  # fmt: skip
# The second round is committed by a and b; neither c nor the endpoint has heard of it.
BEHIND: tuple[Move, ...] = (
    ("establish", "a"), ("propose", "a", "b", "c"), ("send", "a", "b"), ("plan", "b"), ("status", "b", "a"),
    ("send", "a", "c"), ("lease passes", "c"), ("commit", "a"),
)  # fmt: skip
# Then b campaigns, and c answers.
BEHIND_B = (*BEHIND, ("campaign", "b", "next"), ("connect", "c", "b"), ("status", "c", "b"))


@dataclass(frozen=True)
class Break:
    """A rule that is replaced by another.

    Args:
        rule: the function that keeps it.
        seed: of a walk that notices it.
        beginning: moves that come first, where a walk would take long to get there.
        weights: of kinds of moves.
        is_live: it is noticed because the job does not continue.
    """

    name: str
    rule: Where
    wrong: Callable[..., Any]
    setup: Setup
    seed: int = 0
    beginning: tuple[Move, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    is_live: bool = False

    def walk(self, seed: int, *, is_shrunk: bool = True) -> int:
        more = {"beginning": self.beginning, "weights": self.weights, "is_live": self.is_live}
        return walk(self.setup, seed, is_shrunk=is_shrunk, **more)  # type: ignore[arg-type]


def _without_goodbye(leader: str, followers: tuple[str, ...]) -> dict[str, Close]:
    return {leader: Close.HUNG_UP} if leader else {}


def _without_hang_up(leader: str, followers: tuple[str, ...]) -> dict[str, Close]:
    words = dict.fromkeys(followers, Close.GOODBYE)
    return {**words, leader: Close.ORDERLY} if leader else words


def _any_end(close: Close) -> bool:
    return close in {Close.ORDERLY, Close.ABORTED}


def _without_endpoint(configuration: entries.Configuration, cast: votes.Votes) -> bool:
    return votes.has_living_node(configuration, cast) and votes.is_more_than_half(
        configuration, cast.known, cast.endpoints
    )


def _half(configuration: entries.Configuration, nodes: votes.Nodes, endpoints: int) -> bool:
    total = 2 * len(configuration.voters) + len(configuration.incarnations)
    return 2 * (2 * len(nodes.intersection(configuration.voters)) + endpoints) > total - 2


def _all_but_one(configuration: entries.Configuration, cast: votes.Votes) -> bool:
    is_anyone_there = votes.has_living_node(configuration, cast) or cast.endpoints > 0
    return is_anyone_there and len(votes.missing(configuration, cast.known)) <= 1


def _always(*_: object, **__: object) -> bool:
    return True


def _never(*_: object, **__: object) -> bool:
    return False


def _nothing(*_: object) -> None:
    return None


def _no_words(*_: object) -> tuple[()]:
    return ()


replaced = leader.replaced


def _a_too(of: Leader) -> frozenset[str]:
    return replaced(of) | {"a"}


def _quorum(*_: object) -> Mandate:
    return Mandate.QUORUM


def _any_term(own: node.Node, candidate: str, term: int) -> bool:
    return term >= own.term


def _all_failures(parent: entries.Entry, failures: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(failures)


def _open_ones_with_a_plan(of: Leader) -> bool:
    """Those that were sent no plan in this term are not waited for, though they have read one of an earlier term."""
    sent = {name for name, each in of.followers.items() if each.status.term == of.node.term}
    return all(each.has_plan for name, each in of.followers.items() if each.is_open and name in sent)


RECOVERY = Setup(nodes=2, spares=2, ends=1, ends_by_reset=2, resets=1, agents=2)
BREAKS = (
    Break("the last status of an ended follower is not read", (leader, "last_words"), _no_words, Setup(ends=2)),
    Break("the leader counts itself before its plan has left", (leader, "counts_itself"), _always, Setup(ends=2)),
    Break("no Goodbye", (node, "farewells"), _without_goodbye, Setup(ends=2)),
    Break("no HungUp", (node, "farewells"), _without_hang_up, Setup(ends=2, ends_by_reset=1)),
    Break(
        "a plan without what the leader itself accepted",
        (leader, "own_accepted"),
        _nothing,
        Setup(positions=3, campaigns=5, ends=1, resets=2),
    ),
    Break("an end counts without a plan", (node, "can_speak_for_leader"), _always, Setup(ends=1, resets=2)),
    Break("a leader's reset is an end", (node, "leader_has_ended"), _any_end, Setup(ends=2, ends_by_reset=1)),
    Break("a follower's reset is an end", (leader, "follower_has_ended"), _any_end, Setup(ends=2, ends_by_reset=1)),
    Break("5b without the endpoint", (votes, "by_ended_leaders"), _without_endpoint, Setup(ends=2)),
    Break(
        "a quorum without a living node",
        (votes, "has_living_node"),
        _always,
        Setup(nodes=2, spares=1, ends=1, resets=1),
    ),
    Break("no phase 1", (leader, "phase_1_mandate"), _quorum, Setup(ends=1)),
    Break("no adoption", (leader, "adopted"), _nothing, Setup(ends=1)),
    Break("half of the votes", (votes, "is_more_than_half"), _half, Setup(ends=1)),
    Break("an endpoint that forgot has a vote", (votes, "is_named"), _always, Setup(ends=1, forgets=1)),
    Break(
        "one of three endpoints that forgot has a vote",
        (votes, "is_named"),
        _always,
        Setup(nodes=2, endpoints=3, forgets=2),
    ),
    Break("new voters without the endpoint", (votes, "gives_new_votes"), _never, RECOVERY),
    Break("a recovery begins with phase 2", (votes, "is_within"), _always, RECOVERY),
    Break("a newer entry is not taken over", (leader, "takes_over"), _never, RECOVERY),
    Break(
        "a living node closes in order",
        (node, "close_of_living_node"),
        lambda: Close.ORDERLY,
        Setup(nodes=2, resets=2),
    ),
    Break("5c but for one node", (votes, "by_all"), _all_but_one, Setup(ends=1)),
    Break("a living node counts as replaced", (leader, "replaced"), _a_too, Setup(nodes=2, spares=1, ends=1, agents=1)),
    Break(
        "a log is founded beside living nodes",
        (leader, "may_found"),
        lambda of, heard, cast: of.has_listened and of.node.name not in heard.voters,
        Setup(nodes=2, spares=1, is_founding=True, ends=1, forgets=1, campaigns=8),
    ),
    Break(
        "a recovery's term is not above all others",
        (leader, "term_from_clock"),
        lambda seconds, highest: highest + 1,
        RECOVERY,
    ),
    Break("a term twice", (node, "may_follow"), _any_term, Setup(ends=1)),
    Break("an entry by its id that was never seen", (leader, "needs_whole"), _never, Setup(ends=1), is_live=True),
    Break("a failure is charged twice", (entries, "not_charged"), _all_failures, Setup(failures=1)),
    Break("a welcome ends with its term", (leader, "counts_itself"), _open_ones_with_a_plan, Setup(ends=2)),
    Break(
        "two logs in one incarnation",
        (leader, "must_begin_again"),
        _never,
        Setup(nodes=2, spares=2, is_founding=True, ends=1, ends_by_reset=1, resets=1, forgets=1, agents=2, campaigns=8),
    ),
)
