"""The words that agents and their coordinator use.

Facts go up (`Ready`, `Failed`, `Succeeded`, `Left`), decisions come down (`Assigned`, `Interrupted`,
`Ended`).  Every message about a round carries its number, so that a late one can be told from
a current one.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from aelastic.ranks import NodeRanks
from aelastic.record import Record


class Node(Record):
    """One agent, as it introduces itself.

    `node_id` is new each time an agent starts; `preferred_rank` is what the user asked for
    (`--node-rank`) and names the node across its restarts.
    """

    node_id: str
    host: str
    role: str
    local_world_size: int
    master_addr: str  # where workers reach this node's store, should it get group rank 0
    master_port: int
    preferred_rank: int | None = None


class FailureReport(Record):
    """A worker's failure, told to other nodes."""

    host: str
    rank: int
    local_rank: int
    pid: int
    exitcode: int
    message: str
    traceback: str
    timestamp_s: int  # wall time on the node where it happened; for people only


# Node to coordinator.


class Ready(Record):
    """No worker of this node runs; it wants the next round.  Answered by `Assigned` or `Ended`."""

    node: Node


class Failed(Record):
    """A worker of this node failed.  Answered by `Interrupted` or `Ended`, unless the round is over."""

    node_id: str
    round: int
    failure: FailureReport


class Succeeded(Record):
    """Every worker of this node succeeded.  Answered by `Ended`, or by `Interrupted` if the job restarts."""

    node_id: str
    round: int


class Left(Record):
    """This node's part is over, the job's is not.  Not answered."""

    node_id: str
    reason: str


NodeMessage: TypeAlias = Ready | Failed | Succeeded | Left


# Coordinator to node.


class Assigned(Record):
    """A round is complete and this node takes part in it."""

    round: int
    restart_count: int
    ranks: NodeRanks
    master_addr: str
    master_port: int


class Interrupted(Record):
    """The round is over: stop the workers, then be `Ready` for the next."""

    round: int
    reason: str


class Outcome(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed out"  # too few nodes came


class Ended(Record):
    """The job is over: its verdict, the same for every node."""

    outcome: Outcome
    reason: str
    cause: FailureReport | None = None


CoordinatorMessage: TypeAlias = Assigned | Interrupted | Ended
