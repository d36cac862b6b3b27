"""The rules of the log, each broken on purpose, with a kind of world in which a search must notice it."""

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


# When these moves are rare, nodes differ in what they know.
RARE_WRITES = {
    "status": 4, "plan": 3, "closed at leader": 4, "closed at follower": 4, "lease passes": 0.001, "campaign": 0.3,
    "end": 0.3, "lock": 0.3, "write": 0.3, "reset": 0.2, "end by reset": 0.2,
}  # fmt: skip
# The second round is committed by a and b; neither c nor the endpoint knows it.
BEHIND: tuple[Move, ...] = (
    ("establish", "a"), ("propose", "a", "b", "c"), ("send", "a", "b"), ("plan", "b"), ("status", "b", "a"),
    ("send", "a", "c"), ("lease passes", "c"), ("commit", "a"),
)  # fmt: skip
# Then b campaigns, and c answers.
BEHIND_B = (*BEHIND, ("campaign", "b", "next"), ("connect", "c", "b"), ("status", "c", "b"))
# Of two nodes and a spare that became a voter, only the spare is left; new agents replaced the others.
SPARE_IS_LEFT: tuple[Move, ...] = (
    ("connect", "s", "a"), ("status", "s", "a"), ("establish", "a"), ("propose", "a", "b", "s"), ("send", "a", "b"),
    ("send", "a", "s"), ("plan", "b"), ("plan", "s"), ("status", "b", "a"), ("commit", "a"), ("send", "a", "s"),
    ("plan", "s"), ("end by reset", "a"), ("end by reset", "b"), ("replace", "a"), ("replace", "b"),
)  # fmt: skip
# Only nodes that were replaced know the second round, of a term that never reached the endpoint.
LOST_TERM: tuple[Move, ...] = (
    ("campaign", "b", "next"), ("connect", "a", "b"), ("status", "a", "b"), ("establish", "b"), ("propose", "b", "a"),
    ("send", "b", "a"), ("plan", "a"), ("status", "a", "b"), ("commit", "b"), ("end by reset", "a"),
    ("end by reset", "b"), ("replace", "a"), ("replace", "b"), ("campaign", "n0", "clock"), ("campaign", "n0", "clock"),
    ("campaign", "n0", "clock"),
)  # fmt: skip
# The third round has one voter, a, which has committed a fourth one.  b knows that only by its id.
ONLY_ID: tuple[Move, ...] = (
    ("establish", "a"), ("propose", "a", "b"), ("send", "a", "b"), ("plan", "b"), ("status", "b", "a"), ("commit", "a"),
    ("establish", "a"), ("propose", "a"), ("send", "a", "b"), ("plan", "b"), ("status", "b", "a"), ("commit", "a"),
    ("establish", "a"), ("propose", "a"), ("send", "a", "b"), ("commit", "a"), ("send", "a", "b"), ("plan", "b"),
    ("campaign", "b", "clock"), ("lock", "b", 0),
)  # fmt: skip
# The same, but a spare has read a plan of a, and the end of a's connection.
SPARE_READS_END: tuple[Move, ...] = (
    ("connect", "s", "a"), ("status", "s", "a"), ("establish", "a"), ("propose", "a", "b", "c"), ("send", "a", "b"),
    ("send", "a", "c"), ("send", "a", "s"), ("plan", "b"), ("plan", "s"), ("status", "b", "a"), ("lease passes", "c"),
    ("commit", "a"), ("end", "a"), ("closed at follower", "s"), ("campaign", "s", "high"), ("connect", "c", "s"),
)  # fmt: skip
# Two candidates of one term, and a node that answered one and then the other.
ONE_TERM: tuple[Move, ...] = (
    ("campaign", "b", "next"), ("campaign", "c", "next"), ("connect", "a", "c"), ("status", "a", "c"),
    ("connect", "a", "b"), ("status", "a", "b"), ("establish", "b"), ("establish", "c"), ("propose", "b", "a"),
)  # fmt: skip
# The endpoint forgets, and a new agent begins a log there while the older one continues.
SECOND_LOG: tuple[Move, ...] = (
    ("forget", 0), ("establish", "a"), ("campaign", "s", "clock"), ("lock", "s", 0), ("establish", "s"), ("propose", "s"),
    ("write", "s", 0), ("commit", "s"), ("campaign", "a", "high"), ("lock", "a", 0),
)  # fmt: skip
# The endpoint forgets, and a new agent receives a status from one of the living nodes.
STATUS_RECEIVED: tuple[Move, ...] = (
    ("forget", 0), ("campaign", "s", "clock"), ("connect", "b", "s"), ("status", "b", "s"), ("lock", "s", 0),
)  # fmt: skip


@dataclass(frozen=True)
class Break:
    """A rule that is replaced by a wrong one.

    Args:
        rule: the function that implements it.
        seed: the seed of a walk that notices the break.
        beginning: first moves, if a walk would take long to reach that state.
        weights: weights of kinds of moves.
        is_live: the break shows because the job does not continue.
        also: the function that implements the same rule in another phase.
    """

    name: str
    rule: Where
    wrong: Callable[..., Any]
    setup: Setup
    seed: int = 0
    beginning: tuple[Move, ...] = ()
    weights: Mapping[str, float] = field(default_factory=dict)
    is_live: bool = False
    also: tuple[tuple[ModuleType, str, Callable[..., Any]], ...] = ()

    @property
    def changes(self) -> tuple[tuple[ModuleType, str, Callable[..., Any]], ...]:
        return ((*self.rule, self.wrong), *self.also)

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
    """Does not wait for followers without a plan in this term, even if they have read a plan of an earlier term."""
    sent = {name for name, each in of.followers.items() if each.status.term == of.node.term}
    return all(each.has_plan for name, each in of.followers.items() if each.is_open and name in sent)


RECOVERY = Setup(nodes=2, spares=2, ends=1, ends_by_reset=2, resets=1, agents=2)
REPLACED = Setup(nodes=2, spares=1, ends_by_reset=2, resets=1, agents=2)
FOUNDING = Setup(nodes=2, spares=1, is_founding=True, ends=1, resets=1, forgets=1, campaigns=8)
BREAKS = (
    Break(
        "the last status of an ended follower is not read",
        (leader, "last_words"),
        _no_words,
        Setup(ends=2),
        beginning=BEHIND,
        weights=RARE_WRITES,
        seed=37,
    ),
    Break(
        "the leader counts itself before its plan has left",
        (leader, "counts_itself"),
        _always,
        Setup(ends=2),
        weights=RARE_WRITES,
        seed=54,
    ),
    Break("no Goodbye", (node, "farewells"), _without_goodbye, Setup(ends=2), weights=RARE_WRITES, seed=373),
    Break(
        "no HungUp",
        (node, "farewells"),
        _without_hang_up,
        Setup(ends=2, ends_by_reset=1),
        weights=RARE_WRITES,
        seed=168,
    ),
    Break(
        "a plan without what the leader itself accepted",
        (leader, "own_accepted"),
        _nothing,
        Setup(ends=1),
        beginning=(*BEHIND_B, ("send", "b", "c"), ("plan", "c"), ("end", "b")),
        seed=154,
    ),
    Break(
        "an end counts without a plan",
        (node, "can_speak_for_leader"),
        _always,
        Setup(ends=1, resets=2),
        beginning=BEHIND,
        weights=RARE_WRITES,
        seed=315,
    ),
    Break("a leader's reset is an end", (node, "leader_has_ended"), _any_end, Setup(nodes=2, ends_by_reset=1), seed=54),
    Break(
        "a follower's reset is an end",
        (leader, "follower_has_ended"),
        _any_end,
        Setup(ends=2, ends_by_reset=1),
        beginning=BEHIND,
        seed=214,
    ),
    Break(
        "5b without the endpoint",
        (votes, "by_ended_leaders"),
        _without_endpoint,
        Setup(ends=2),
        weights=RARE_WRITES,
        seed=28,
    ),
    Break("no phase 1", (leader, "phase_1_mandate"), _quorum, Setup(ends=1), beginning=BEHIND, seed=5),
    Break("no adoption", (leader, "adopted"), _nothing, Setup(ends=1), beginning=BEHIND, seed=5),
    Break("half of the votes", (votes, "is_more_than_half"), _half, Setup(ends=1), beginning=BEHIND, seed=5),
    Break(
        "an endpoint that forgot has a vote",
        (votes, "is_named"),
        _always,
        Setup(ends=1, forgets=1),
        weights=RARE_WRITES,
        seed=467,
    ),
    Break(
        "one of three endpoints that forgot has a vote",
        (votes, "is_named"),
        _always,
        Setup(nodes=2, endpoints=3, forgets=2),
        weights=RARE_WRITES,
        seed=33,
    ),
    Break(
        "new voters without the endpoint",
        (votes, "gives_new_votes"),
        _never,
        REPLACED,
        beginning=SPARE_IS_LEFT,
        seed=169,
    ),
    Break("a recovery begins with phase 2", (votes, "is_within"), _always, RECOVERY, seed=33),
    Break(
        "a newer entry is not taken over",
        (leader, "takes_over"),
        _never,
        Setup(ends=1),
        beginning=BEHIND,
        also=((leader, "newest_committed", lambda of: of.node.committed),),
        seed=31,
    ),
    Break(
        "a living node closes in order",
        (node, "close_of_living_node"),
        lambda: Close.ORDERLY,
        Setup(nodes=2, resets=2),
        weights=RARE_WRITES,
        seed=4,
    ),
    Break(
        "5c but for one node",
        (votes, "by_all"),
        _all_but_one,
        Setup(ends=1),
        beginning=BEHIND,
        weights=RARE_WRITES,
        seed=2,
    ),
    Break(
        "a living node counts as replaced",
        (leader, "replaced"),
        _a_too,
        Setup(nodes=2, spares=1, ends=1, agents=1),
        seed=328,
    ),
    Break(
        "a log is founded beside living nodes",
        (leader, "may_found"),
        lambda of, known, cast: of.has_listened and of.node.name not in known.voters,
        FOUNDING,
        beginning=STATUS_RECEIVED,
        seed=3,
    ),
    Break(
        "a recovery's term is not above all others",
        (leader, "term_from_clock"),
        lambda seconds, highest: highest + 1,
        REPLACED,
        beginning=LOST_TERM,
        seed=4,
    ),
    Break(
        "a lost entry is replaced while one of its voters lives",
        (leader, "may_recover_from"),
        _always,
        Setup(nodes=2, ends_by_reset=1, agents=1, positions=6),
        beginning=ONLY_ID,
        seed=0,
    ),
    Break("two votes in a term", (node, "may_follow"), _any_term, Setup(ends=1), beginning=ONE_TERM, seed=481),
    Break(
        "an entry by its id that was never seen", (leader, "needs_whole"), _never, Setup(ends=1), is_live=True, seed=0
    ),
    Break("a failure is charged twice", (entries, "not_charged"), _all_failures, Setup(failures=1), seed=1),
    Break(
        "a welcome ends with its term",
        (leader, "counts_itself"),
        _open_ones_with_a_plan,
        Setup(ends=2),
        beginning=BEHIND_B,
        weights=RARE_WRITES,
        seed=326,
    ),
    Break(
        "two logs in one incarnation",
        (leader, "must_begin_again"),
        _never,
        FOUNDING,
        beginning=SECOND_LOG,
        seed=0,
    ),
    Break(
        "a node without a vote speaks for its leader",
        (node, "can_speak_for_leader"),
        lambda of: of.has_read_plan,
        Setup(spares=1, ends=1),
        beginning=SPARE_READS_END,
        seed=0,
    ),
)
