"""Whether nodes that a coordinator has not heard of could have elected another one, and go on with it.

Nodes of a round elect by majority (`election.py`).  So a coordinator begins a round only while the nodes that it has
no contact with are fewer than a majority of each round that a node may still vote by:

- the last round that it knows of, and each one before it of which too few nodes have said that they know a newer one;
- a node votes by what it said last (`Alive`, `Hello`): it may know of a round that this coordinator has not begun.

No contact: a node that is silent, or whose connection broke.  A node whose process ended, which its kernel says by
closing the connection, has no vote, and neither has one whose place another agent has taken, on the same host.

The endpoint decides where both halves are of one size: whoever cannot ask it needs more than the other half.  And only
whoever can ask it takes a node's word (`Hello`) that the process of an earlier coordinator has ended: were it left out
on both sides, each could have enough of the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from aelastic.host.listeners import is_loopback
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.addresses import master_address

# So many fit into a message of some kilobytes that goes to each of them; a larger round has no elections.
SEATS_MAX = 128


@dataclass(slots=True)
class Electorate:
    """Rounds that a node may vote by, and what is known of their nodes.

    Args:
        is_on: there are elections.
    """

    is_on: bool = False
    rounds: dict[int, m.Seats] = field(default_factory=dict[int, m.Seats])  # by fence
    _votes_by: dict[str, int] = field(default_factory=dict[str, int])  # node to fence, as it said last
    _dead: set[str] = field(default_factory=set[str])
    _ended: set[str] = field(default_factory=set[str])  # coordinators before this one, as nodes have said
    _place_of: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])  # host and address
    _way: str = ""  # this host's address, as others have reached it

    def begin(self, assigned: m.Assigned, secret: str, nodes: list[m.Node]) -> m.Seats | None:
        """A round has begun; gives what its nodes are to know; `None`: they have no vote."""
        if assigned.fence in self.rounds:
            return self.rounds[assigned.fence]  # a node has missed it
        is_all = len(nodes) == assigned.ranks.group_world_size <= SEATS_MAX
        if not is_all or not all(node.ballot_port for node in nodes):
            return None
        seats = m.Seats(assigned.fence, assigned.round, secret, tuple(_seat(node, nodes) for node in nodes))
        self.rounds[assigned.fence] = seats
        return seats

    def on_said(self, node_id: str, fence: int) -> None:
        self._votes_by[node_id] = max(fence, self._votes_by.get(node_id, 0))

    def on_welcome(self, node: m.Node, seats: m.Seats | None) -> None:
        self._dead.discard(node.node_id)
        self._ended.discard(node.node_id)
        is_here = is_loopback(node.master_addr)
        self._place_of[node.node_id] = node.host, "" if is_here else node.master_addr
        self._way = self._way if is_here else node.way_address
        if seats is not None and self.is_on and len(seats.seats) <= SEATS_MAX:
            self.rounds.setdefault(seats.fence, seats)
            self.on_said(node.node_id, seats.fence)

    def on_dead(self, node_id: str) -> None:
        """Its process has ended, or it has left the job."""
        self._dead.add(node_id)

    def on_ended(self, node_ids: Iterable[str]) -> None:
        """Coordinators before this one whose process has ended, as a node has seen."""
        self._ended.update(node_ids)

    def missing(self, is_connected: Callable[[str], bool], *, is_on_board: bool) -> list[m.Seat]:
        """Nodes that could have elected another coordinator; none, if this one may begin a round."""
        for fence, round_ in sorted(self.rounds.items()):
            voters = [seat for seat in round_.seats if self._may_vote(seat.node_id, fence)]
            if len(voters) < round_.majority:
                del self.rounds[fence]  # too few vote by it still
                continue
            missing = self._missing(round_, voters, is_connected)
            if is_on_board:
                missing = [seat for seat in missing if seat.node_id not in self._ended]
            is_half = not is_on_board and 2 * len(missing) >= len(voters)
            if len(missing) >= round_.majority or is_half:
                return missing
        return []

    def _missing(self, round_: m.Seats, voters: list[m.Seat], is_connected: Callable[[str], bool]) -> list[m.Seat]:
        """Nodes of a round that there is no contact with, nor an agent in the place of one."""
        missing = [seat for seat in voters if not is_connected(seat.node_id)]
        if not missing:
            return []
        known = {seat.node_id for seat in round_.seats}
        places = {i: place for i, place in self._place_of.items() if i not in known and is_connected(i)}
        newcomers = Counter((host, address or self._way) for host, address in places.values())
        newcomers.subtract((seat.host, seat.address) for seat in round_.seats if seat.node_id in self._dead)
        found = list[m.Seat]()
        for seat in missing:
            if newcomers[seat.host, seat.address] > 0:
                newcomers[seat.host, seat.address] -= 1
            else:
                found.append(seat)
        return found

    def _may_vote(self, node_id: str, fence: int) -> bool:
        return node_id not in self._dead and self._votes_by.get(node_id, 0) <= fence


def _seat(node: m.Node, nodes: list[m.Node]) -> m.Seat:
    return m.Seat(node.node_id, node.host, master_address([node, *nodes]), node.ballot_port)
