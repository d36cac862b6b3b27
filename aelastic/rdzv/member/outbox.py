"""What this node has to say to the coordinator: its greeting, what came after it, the next heartbeat."""

from __future__ import annotations

from dataclasses import dataclass

from aelastic.decisions.cause import Cause
from aelastic.rdzv.leader_record import LeaderRecord
from aelastic.rdzv.member.node_state import NodeState
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import PROTOCOL


@dataclass(slots=True)
class Outbox:
    unsent: m.NodeMessage | None = None  # submitted since `Hello`: sent with the welcome
    heartbeat_at: float = 0.0
    _greeted_end: Cause | None = None  # of the last round, as `Hello` has said it

    def greet(self, terms: m.Terms, to: LeaderRecord, state: NodeState, epoch: int, now: float) -> m.Hello:
        """All that is known of this node, and the newest epoch that it knows."""
        assert state.node is not None, "a node that connects is ready for a round, or has been"
        self.unsent, self._greeted_end = None, state.ended
        state.on_coordinator_lives(to.candidate.node_id)  # it listens
        ended = tuple(sorted(state.ended_nodes))
        return m.Hello(PROTOCOL, terms, to.candidate.token, state.node, state.past_at(now), epoch, state.seats, ended)

    def keep(self, message: m.NodeMessage) -> None:
        """`Hello` is not answered yet, and has said what was before."""
        is_detail = isinstance(message, m.Prepared | m.OptedIn)
        if is_detail and self.unsent is not None:
            return  # it takes part in a round, or that is over
        is_all = isinstance(message, m.Ready) or isinstance(self.unsent, m.Prepared | m.OptedIn | None)
        assert is_all, "between Hello and Welcome one message says all that follows"
        self.unsent = message

    def is_outdated(self, state: NodeState) -> bool:
        """Whether this node has ended its round by itself since `Hello`, which says how that came and when."""
        return state.ended != self._greeted_end

    def take_unsent(self) -> m.NodeMessage | None:
        unsent, self.unsent = self.unsent, None
        return unsent

    def is_heartbeat_due(self, lease_s: float, now: float) -> bool:
        """Whether a heartbeat is due, which is sent then."""
        if now < self.heartbeat_at:
            return False
        self.put_off_heartbeat(lease_s, now)
        return True

    def put_off_heartbeat(self, lease_s: float, now: float) -> None:
        """The coordinator hears this node now: the next heartbeat is due a third of a lease later."""
        self.heartbeat_at = now + lease_s / 3
