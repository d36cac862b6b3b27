"""The words that agents and their coordinator use.

Facts go up (`Ready`, `Failed`, `Succeeded`, `Left`), decisions come down (`Assigned`, `Interrupted`,
`Ended`).  Every message about a round carries its number, so that a late one can be told from
a current one.  The rest is between the two ends of a stream: who is there (`Hello`, `Welcome`, `Refused`), who
is still alive (`Alive`, `Heartbeat`, `Probe`), who goes (`Goodbye`, `Departed`); `wire.py` has their bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from aelastic.core.record import Record
from aelastic.failures.failure import ProcessFailure
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.settings import LEASE_S


class Node(Record):
    """One agent, as it introduces itself.

    `node_id` is new each time an agent starts; `preferred_rank` is what the user asked for
    (`--node-rank`) and names the node across its restarts.
    """

    node_id: str
    host: str
    role: str
    local_world_size: int
    # Where workers reach this node's store, should it get group rank 0.  Empty: where its connection comes from.
    master_addr: str
    master_port: int
    preferred_rank: int | None = None
    # The coordinator's own address, as this node reached it.
    way_address: str = ""


# Node to coordinator.


class Ready(Record):
    """No worker of this node runs; it wants the next round.  Answered by `Assigned` or `Ended`."""

    node: Node


class Failed(Record):
    """A worker of this node failed.  Answered by `Interrupted` or `Ended`, unless the round is over."""

    node_id: str
    round: int
    failure: ProcessFailure


class Succeeded(Record):
    """Every worker of this node succeeded.  Answered by `Ended`, or by `Interrupted` if the job restarts."""

    node_id: str
    round: int


class Left(Record):
    """This node's part is over, the job's is not.  Not answered."""

    node_id: str
    reason: str


NodeMessage: TypeAlias = Ready | Failed | Succeeded | Left


class Terms(Record):
    """What every agent of a job must have been told alike."""

    run_id: str
    min_nodes: int
    max_nodes: int
    max_restarts: int
    lease_s: float = LEASE_S


class Standing(StrEnum):
    """What a node does."""

    READY = "ready"  # waits for the next round
    BUSY = "busy"  # its workers run
    STOPPING = "stopping"  # its workers are being stopped, for the next round
    FAILED = "failed"  # a worker failed, and nobody has said yet what follows
    FINISHED = "finished"  # its workers succeeded


class Past(Record):
    """Where a node stands, for a coordinator that may know nothing of it."""

    standing: Standing
    round: int = 0  # the last one it took part in; 0: none yet
    restart_count: int = 0  # the highest it has heard of
    group_rank: int = -1  # in that round
    group_world_size: int = 0
    coordinator_rank: int = -1  # the group rank of the coordinator's own node in that round; -1: it had none
    failure: ProcessFailure | None = None
    departed: tuple[int, ...] = ()  # group ranks of that round that finished, and have left
    has_spares: bool = False  # nodes waited for a place in that round


class Hello(Record):
    """The first word on a connection.  Answered by `Welcome` or `Refused`."""

    protocol: int
    terms: Terms
    token: str  # as the board has it
    node: Node
    past: Past
    seen_epoch: int  # the newest reign this node knows of


class Alive(Record):
    """Nothing new.  Not answered."""


Upward: TypeAlias = Hello | Alive | NodeMessage


# Coordinator to node.


class Assigned(Record):
    """A round is complete and this node takes part in it."""

    round: int
    restart_count: int
    ranks: NodeRanks
    master_addr: str
    master_port: int
    coordinator_rank: int = -1
    # Who serves the workers' store: the agent of group rank 0, whatever the rendezvous uses, or the worker of rank 0.
    store_server: str = "agent"


class Interrupted(Record):
    """The round is over: stop the workers, then be `Ready` for the next."""

    round: int
    reason: str
    restart_count: int = 0  # of the round to come


class Outcome(StrEnum):
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    TIMED_OUT = "timed out"  # too few nodes came
    REPLACED = "replaced"  # for one node only: another came in its name


class Ended(Record):
    """The job is over: its verdict, the same for every node."""

    outcome: Outcome
    reason: str
    cause: ProcessFailure | None = None


class Waiting(Record):
    """What is waited for.  Told every few seconds, for people."""

    text: str


CoordinatorMessage: TypeAlias = Assigned | Interrupted | Ended | Waiting


class Departed(Record):
    """A node that had finished has left the job: the round goes on without it.  For who coordinates after us."""

    round: int
    group_rank: int


class Welcome(Record):
    """You belong to this reign.  Said again when the reign gets a new epoch."""

    epoch: int
    lease_s: float


class Refused(Record):
    """You can't take part.  Its form stays the same in every version of the protocol."""

    reason: str
    # Whether asking again is of no use: it is your command line, or your version, that is wrong.
    is_final: bool


class Heartbeat(Record):
    """The coordinator lives, and has renewed its record on the board so many times."""

    renewals: int
    has_spares: bool = False  # nodes wait for a place in the round that runs


class Probe(Record):
    """Are you alive?  Answered by `Alive`, at once."""


class Goodbye(Record):
    """This coordinator is one no more: ask the board for the next."""

    reason: str
    is_gone: bool  # its agent leaves; else it was deposed, and its node stays in its round


Downward: TypeAlias = Welcome | Refused | Heartbeat | Probe | Goodbye | Departed | CoordinatorMessage
