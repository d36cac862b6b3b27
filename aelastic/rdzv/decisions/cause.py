"""What ended a round, or this node's part in it."""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum
from heapq import nsmallest

from aelastic.base.record import Record

# Nobody reads a line with more names.
NAMES_MAX = 16


def first_of(names: Collection[str]) -> tuple[str, ...]:
    """Returns as many names as a line takes, in order."""
    return tuple(nsmallest(NAMES_MAX, names))


def listed(names: Collection[str], count: int) -> str:
    """Returns names for a line, and how many more there are of `count` in all."""
    more = count - len(names)
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")


class CauseKind(StrEnum):
    """What happened.  The names are those of the event log; they stay."""

    PENDING = "pending"  # a connection broke, and its node may come back: it is not yet known whether that was a loss
    FAILURE = "failure"  # a worker failed
    NODE_LOST = "node_lost"  # without a message
    NODE_LEFT = "node_left"  # with one
    CONNECTION_BROKE = "connection_broke"  # its node is back
    LEADER_LOST = "leader_lost"  # with its node, which had a place in the round
    NODES_MISSING = "nodes_missing"  # they did not reconnect to a new leader
    WORKERS_RESTARTED = "workers_restarted"  # one node has stopped its workers without a request
    NODES_JOINED = "nodes_joined"
    NODES_WAITING = "nodes_waiting"  # the number that a torch rendezvous reports
    ENDPOINT_SILENT = "endpoint_silent"  # others may have another leader
    LEADER_SILENT = "leader_silent"  # and so is the endpoint: as above
    NODES_SILENT = "nodes_silent"  # all others: as above
    ENDED_EARLIER = "ended_earlier"  # before a new leader took it over
    HOST_CORDONED = "host_cordoned"
    DRAIN = "drain"  # nodes leave in order
    RESTART_REQUESTED = "restart_requested"
    STOP_REQUESTED = "stop_requested"
    ALL_SUCCEEDED = "all_succeeded"
    # Of one node's part in a round.
    CONTINUED_WITHOUT = "continued_without"  # the round runs, or has ended, without this node
    ROUND_ENDED = "round_ended"  # while this node was away
    AGENT_FROZEN = "agent_frozen"  # and the guard has killed its workers
    REPLACED = "replaced"  # by another agent with the same node rank
    TORCH = "torch"  # a torch rendezvous reported it


class Innocence(StrEnum):
    """Why one failure is not evidence against its host."""

    HANG = "hang"
    MEMORY = "lack of memory"
    LOST_CONNECTION = "lost connection"
    SIGNAL = "signal"
    ERROR = "error of the script"


class SaveOutcome(StrEnum):
    """How far ranks got with saving, before workers were stopped for a drain or on request."""

    NOT_ASKED = "not_asked"
    ALL = "all"
    LATE = "late"  # some nodes had not saved in time
    NO_CALL = "no_call"  # no call to save at could be agreed in time


class Cause(Record):
    """What ended a round.  Which fields it has depends on its kind; `detail` is for people, and nothing reads it."""

    kind: CauseKind
    hosts: tuple[str, ...] = ()  # that it is about; some of them, if there are many
    ranks: tuple[int, ...] = ()  # the worker's, of a failure; else group ranks, or a node rank
    round: int = 0
    count: int = 0  # of hosts, or nodes, in all
    within_s: float = 0.0  # of a drain, or a save; or of a silence
    saved: SaveOutcome = SaveOutcome.NOT_ASKED
    late: int = 0  # nodes that had not saved in time
    nodes: int = 0  # nodes in all
    is_loss: bool = False  # a node of the round was lost, rather than leaving by itself or on request
    detail: str = ""

    @property
    def is_known(self) -> bool:
        return self.kind is not CauseKind.PENDING

    @property
    def is_failure(self) -> bool:
        return self.kind is CauseKind.FAILURE

    @property
    def host(self) -> str:
        """The one host that it is about, or "", or several."""
        return self.hosts[0] if len(self.hosts) == 1 and self.count <= 1 else ""

    @property
    def lost_host(self) -> str:
        """The host that was lost; "" if none was, or it is not known which."""
        return self.host if self.is_loss and self.kind in {CauseKind.NODE_LOST, CauseKind.LEADER_LOST} else ""

    @classmethod
    def of_hosts(cls, kind: CauseKind, hosts: Collection[str], **more: object) -> Cause:
        """Returns a cause with as many names as a line takes."""
        return cls(kind, first_of(hosts), count=len(hosts), **more)  # type: ignore[arg-type]


PENDING = Cause(CauseKind.PENDING)
