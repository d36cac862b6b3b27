"""Quorum check: may this coordinator start a round, or could unreachable nodes have elected another?

Nodes of a round elect by majority (`election.py`).  So a coordinator begins a round only while it has contact with more
than half of *all* nodes of each round that a node may still vote by; half is enough where the endpoint answers it:

- the last round that it knows of, and each one before it of which half of the nodes or more may not know a newer one;
- a node votes by what it said last (`Alive`, `Hello`): it may know of a round that this coordinator has not begun.

So of two coordinators that begin a round after the same one, a node has been in contact with both, and it has told the
second what it had heard from the first.  Nodes hear of each round, also of one without them, and bring that along.

No contact: a node that is silent, or whose connection broke.  A node whose process ended counts as one in contact: its
kernel closes the connection in order, after its last word, and no other coordinator can have seen that.  All nodes of a
round see the process of their coordinator end (`Hello`), so that counts on one side only: where the endpoint answers.

A new agent in the place of a missing one, on its host, remembers nothing: the one before may have gone on elsewhere,
and what it went on with may live.  So such agents count only if one is in the place of each node that is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from aelastic.host.sockets import is_address, is_loopback
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.addresses import master_address, peer_addresses

# Nodes that have ended before a round is heard of that they were in, and agents that came and went, so many at most.
REMEMBERED_MAX = 256


@dataclass(slots=True)
class Electorate:
    """Rounds that a node may vote by, and what is known of their nodes.

    Args:
        is_on: there are elections.
        is_on_board: the board has answered the last renewal.
    """

    is_on: bool = False
    is_on_board: bool = True
    rounds: dict[int, m.Seats] = field(default_factory=dict[int, m.Seats])  # by fence
    _votes_by: dict[str, int] = field(default_factory=dict[str, int])  # node to fence, as it said last
    closing: m.Closing | None = None  # the verdict that this coordinator proposes
    _knows: dict[str, int] = field(default_factory=dict[str, int])  # node to the epoch of the verdict that it knows
    _dead: dict[str, None] = field(default_factory=dict[str, None])  # the first first
    _ended: dict[str, None] = field(default_factory=dict[str, None])  # coordinators before this one, as nodes have said
    _place_of: dict[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])  # host and address
    _way: str = ""  # this host's address, as others have reached it
    _forget_above: int = 2 * REMEMBERED_MAX

    def may_vote_by(self, assigned: m.Assigned) -> bool:
        """Whether a round may have elections that its nodes have not heard of: a welcome tells of them, too."""
        is_small = assigned.ranks.group_world_size <= m.SEATS_MAX
        return self.is_on and is_small and assigned.fence not in self.rounds

    def begin(
        self, assigned: m.Assigned, secret: str, nodes: list[m.Node], is_connected: Callable[[str], bool]
    ) -> m.Seats | None:
        """A round has begun; gives what its nodes are to know; `None`: they have no vote."""
        is_all = len(nodes) == assigned.ranks.group_world_size <= m.SEATS_MAX
        if not is_all or not all(node.ballot_port for node in nodes):
            return None
        is_bound = any(round_.needs_endpoint for round_ in self.rounds.values() if round_.secret != secret)
        is_bound = is_bound or bool(self.missing(is_connected, is_on_board=False))
        seats = m.Seats(assigned.fence, assigned.round, secret, _seated(nodes), is_bound)
        self.rounds[assigned.fence] = seats
        return seats

    def validate(self) -> None:
        assert all(fence == round_.fence for fence, round_ in self.rounds.items()), "a round has its own fence"
        most = max((len(round_.seats) for round_ in self.rounds.values()), default=0)
        assert most <= m.SEATS_MAX, "a larger round has no elections"

    def on_board(self, *, has_answered: bool) -> None:
        """Whether the board has answered the last renewal."""
        self.is_on_board = has_answered

    @property
    def can_elect(self) -> bool:
        """Whether nodes of a round can elect another coordinator: two of three can, one of two cannot."""
        return any(len(round_.seats) > 2 for round_ in self.rounds.values())

    def on_said(self, node_id: str, fence: int, closing_epoch: int = 0) -> None:
        self._knows[node_id] = closing_epoch
        if fence > self._votes_by.get(node_id, 0):
            self._votes_by[node_id] = fence
            self._forget_outvoted()

    def close(self, closing: m.Closing) -> m.Seats | None:
        """A verdict is proposed; gives what nodes are to know; `None`: they elect none."""
        if not self.is_on or not self.rounds:
            return None
        self.closing, newest = closing, self.newest_fence
        self.rounds[newest] = self.rounds[newest].replace(closing=closing)
        return self.rounds[newest]

    @property
    def unmet(self) -> bool:
        """Whether nodes of the last round may live that this coordinator has never met."""
        newest = self.newest
        seats = newest.seats if newest is not None else ()
        return any(seat.node_id not in self._place_of and seat.node_id not in self._ended for seat in seats)

    def knows_verdict(self, node_id: str) -> bool:
        """Whether a node would tell another coordinator."""
        return self.closing is None or self._knows.get(node_id, 0) >= self.closing.epoch

    def on_welcome(self, node: m.Node, seats: m.Seats | None) -> None:
        self._dead.pop(node.node_id, None)
        self._ended.pop(node.node_id, None)
        is_here = is_loopback(node.master_addr)
        self._place_of[node.node_id] = node.host, "" if is_here else node.master_addr
        self._way = self._way if is_here else node.way_address
        if seats is not None and self.is_on:
            known = self.rounds.setdefault(seats.fence, seats)
            if known.secret == seats.secret and seats.replaces(known):
                self.rounds[seats.fence] = seats
            self.on_said(node.node_id, seats.fence, seats.closing_epoch)
            self._forget_outvoted()

    def host_of(self, node_id: str) -> str:
        """The host of a node that was welcomed."""
        return self._place_of[node_id][0]

    def on_board_knows(self, seats: m.Seats | None) -> None:
        """The board knows of a round, of which no node need have been heard; one that needs the board has ended."""
        if seats is not None and self.is_on and not seats.needs_endpoint and len(seats.seats) <= m.SEATS_MAX:
            self.rounds.setdefault(seats.fence, seats)

    @property
    def newest(self) -> m.Seats | None:
        return self.rounds[max(self.rounds)] if self.rounds else None

    @property
    def newest_for_board(self) -> m.Seats | None:
        """Without a verdict, which nodes alone make count."""
        return None if (newest := self.newest) is None else newest.replace(closing=None)

    @property
    def newest_fence(self) -> int:
        return max(self.rounds, default=0)

    def has_any(self, is_connected: Callable[[str], bool]) -> bool:
        """Whether a node of one of the rounds is connected."""
        return any(is_connected(seat.node_id) for round_ in self.rounds.values() for seat in round_.seats)

    def newer_than(self, seats: m.Seats | None) -> m.Seats | None:
        """The newest round, if a node that knows this one does not know it."""
        newest = self.newest
        return newest if newest is not None and newest.replaces(seats) else None

    def on_dead(self, node_id: str) -> None:
        """Its process has ended, or it has left the job."""
        if self.is_on:
            self._dead[node_id] = None
            self._forget_outvoted()

    def on_ended(self, node_ids: Iterable[str]) -> None:
        """Coordinators before this one whose process has ended, as a node has seen."""
        self._ended.update(dict.fromkeys(node_ids))

    def forget(self, is_known: Callable[[str], bool]) -> None:
        """Forgets nodes that are neither known nor seated, once there are many: agents come and go all the time."""
        sizes = len(self._place_of), len(self._votes_by), len(self._dead), len(self._ended)
        if max(sizes) <= self._forget_above:
            return
        seated = {seat.node_id for round_ in self.rounds.values() for seat in round_.seats}
        self._place_of = {i: place for i, place in self._place_of.items() if is_known(i)}
        self._votes_by = {i: fence for i, fence in self._votes_by.items() if i in seated or is_known(i)}
        self._knows = {i: epoch for i, epoch in self._knows.items() if i in seated or is_known(i)}
        for book in (self._dead, self._ended):
            for node_id in [i for i in book if i not in seated][:-REMEMBERED_MAX]:
                del book[node_id]
        self._forget_above = 2 * (REMEMBERED_MAX + len(seated) + len(self._place_of))

    def _forget_outvoted(self) -> None:
        """Forgets rounds that too few nodes vote by still."""
        for fence, round_ in list(self.rounds.items()):
            if 2 * sum(self._may_vote(seat.node_id, fence) for seat in round_.seats) < len(round_.seats):
                del self.rounds[fence]

    def missing(self, is_connected: Callable[[str], bool], *, is_on_board: bool) -> list[m.Seat]:
        """Nodes that could go on with another coordinator; none, if this one may begin a round."""
        for fence, round_ in sorted(self.rounds.items()):
            size = len(round_.seats)
            voters = [seat for seat in round_.seats if self._may_vote(seat.node_id, fence)]
            gone = self._ended if is_on_board else ()
            missing = [seat for seat in voters if seat.node_id not in gone and not is_connected(seat.node_id)]
            if 2 * len(missing) >= size + is_on_board and (rest := self._unreplaced(round_, missing, is_connected)):
                return rest
        return []

    def _unreplaced(self, round_: m.Seats, missing: list[m.Seat], is_connected: Callable[[str], bool]) -> list[m.Seat]:
        """Those in whose place no other agent has come."""
        known = {seat.node_id for seat in round_.seats}
        places = {i: place for i, place in self._place_of.items() if i not in known and is_connected(i)}
        newcomers = Counter((host, address or self._way) for host, address in places.values())
        # Where all nodes were on the coordinator's machine, their seats have its loopback address.
        place_of = {s.node_id: (s.host, self._way if is_loopback(s.address) else s.address) for s in round_.seats}
        newcomers.subtract(place_of[seat.node_id] for seat in round_.seats if seat.node_id in self._dead)
        found = list[m.Seat]()
        for seat in missing:
            if newcomers[place_of[seat.node_id]] > 0:
                newcomers[place_of[seat.node_id]] -= 1
            else:
                found.append(seat)
        return found

    def _may_vote(self, node_id: str, fence: int) -> bool:
        return node_id not in self._dead and self._votes_by.get(node_id, 0) <= fence


def _seated(nodes: Sequence[m.Node]) -> tuple[m.Seat, ...]:
    """The seats of a round's nodes."""
    seats = []
    for node, peer_address in zip(nodes, peer_addresses(nodes), strict=True):
        address = master_address([node, *nodes])
        also = "" if is_address(address) else peer_address
        seats.append(m.Seat(node.node_id, node.host, address, node.ballot_port, also))
    return tuple(seats)
