"""A comparison of what all workers of a round do, begun when a node finds that one of its workers hangs.

Every node of the round is asked at once, before anything is stopped.  Once all have answered, or the node that asked
waits no longer, the places are compared (`failures.places`), and all nodes receive the same result.  A comparison
decides nothing about the round.  A leader that takes over knows of no comparison: the node that asked
continues with what it sees itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aelastic.diagnose.failures.places import Place, compare
from aelastic.rdzv.leader.coordinator_events import Send
from aelastic.rdzv.leader.roster import Roster
from aelastic.rdzv.protocol import messages as m

NO_ANSWER = "no answer from its agent"


def compared(question: m.Hangs, places: Sequence[Place]) -> m.Compared:
    """Compares the places of all workers that were reported."""
    found = compare(places, question.waited_s)
    return m.Compared(question.round, found.text, found.outliers, question.is_stopped, question.waited_s)


def filled(places: Sequence[Place], host: str, assigned: m.Assigned) -> list[Place]:
    """Returns the places of a node's workers, including those not reported."""
    first, seen = assigned.ranks.first_rank, {place.rank: place.replace(host=host) for place in places}
    ranks = range(first, first + assigned.ranks.local_world_size)
    return [seen.get(rank, Place(rank, host, 0, unknown=NO_ANSWER)) for rank in ranks]


@dataclass(slots=True)
class HangComparison:
    """The comparison within one round; idle while there is no question."""

    question: m.Hangs | None = None  # the first one of the present comparison
    number: int = 0  # of the last question
    _asked: list[str] = field(default_factory=list[str])  # nodes
    _awaited: set[str] = field(default_factory=set[str])  # those of them that have not answered
    _places: dict[str, tuple[Place, ...]] = field(default_factory=dict[str, tuple[Place, ...]])  # by node

    def handle(self, event: m.Hangs | m.Saw, round_: int, roster: Roster) -> list[Send]:
        """Handles a question or an answer; returns what to send.  O(1), except for the first question and last answer.

        Args:
            event: the question or answer.
            round_: the running round; anything about another one is void.
            roster: its nodes.
        """
        if self.question is not None and self.question.round != round_:
            self.question = None
        if event.round != round_:
            return []
        match event:
            case m.Hangs(node_id, is_last=False) if self.question is None and node_id in roster.participants:
                self._asked, self._places = roster.connected_participants(), {}
                self.question, self._awaited, self.number = event, set(self._asked), self.number + 1
                return [Send(node_id, m.Look(round_, event.reason, self.number)) for node_id in self._asked]
            case m.Saw(number=number) if self.question is None or number != self.number:
                return []  # it answers an earlier question
            case m.Saw(node_id, _, places) if self.question is not None and node_id in self._awaited:
                self._places[node_id] = places
                self._awaited.discard(node_id)
                return [] if self._awaited else self._compare(self.question, roster)
            case m.Hangs(is_last=True) if self.question is not None:
                return self._compare(self.question, roster)
            case _:
                return []  # it is under way, or over

    def _compare(self, question: m.Hangs, roster: Roster) -> list[Send]:
        self.question = None
        places = [place for node_id in self._asked for place in self._places_of(node_id, roster)]
        result = compared(question, places).replace(number=self.number)
        return [Send(node_id, result) for node_id in self._asked if node_id in roster.members]

    def _places_of(self, node_id: str, roster: Roster) -> list[Place]:
        member, assigned = roster.members.get(node_id), roster.participants.get(node_id)
        host, places = "" if member is None else member.node.host, self._places.get(node_id, ())
        if assigned is None:  # of a round that is older than this leader
            return [*places] or [Place(-1, host, 0, unknown=NO_ANSWER)]
        return filled(places, host, assigned)
