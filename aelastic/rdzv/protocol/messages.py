"""Messages between agents and their leader: states, not events.

A node sends its whole `Status` when it connects (in `Hello`), and again whenever it changes.  The leader sends each
node its whole `Plan` whenever that changes.  Either may be repeated, or lost with its connection: the next one contains
everything.  Other messages are about connections: a refusal (`Refused`), signs of life (`Alive`, `Heartbeat`, `Probe`)
and the end (`HungUp`, `GivenUp`, `Goodbye`).

Between an agent's supervisor and its member there are events: what the supervisor submits (`NodeMessage`) changes the
status, and what is new in a plan is delivered to it (`LeaderMessage`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ProcessFailure
from aelastic.diagnose.failures.places import Place
from aelastic.rdzv.decisions.cause import Cause
from aelastic.rdzv.decisions.decision import Decision
from aelastic.rdzv.ledger import Reached
from aelastic.rdzv.log import node as log
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import EntryId
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.rdzv.protocol.requests import (
    Answer,
    Ask,
    Cordoned,
    Fetch,
    Fetched,
    Frozen,
    Notice,
    Query,
    Reply,
    Request,
    Saved,
    Show,
    Shown,
)
from aelastic.rdzv.protocol.waiting import Waiting as Waiting  # noqa: PLC0414  also a message
from aelastic.rdzv.protocol.waiting import WaitKind as WaitKind  # noqa: PLC0414

# Rises whenever a message changes its form; agents of different versions do not form a job.
PROTOCOL = 20
# In a fencing number, a term (about the milliseconds since 1970) counts as this many rounds: it fits 2^53 until 2255.
ROUNDS_OF_A_TERM = 1_000
ROUND_MAX = 1_000_000  # more than any job has
TERMS_AHEAD_MAX = 1_000_000_000_000  # milliseconds: a wall clock may be behind by thirty years, but no further
STORE_SERVERS = "agent", "worker"  # the agent of group rank 0 or the worker of rank 0 serves the workers' store


def fence_of(term: int, round_: int) -> int:
    """Returns the fencing number of a round: above that of each earlier one, even if two have the same number.

    Two logs may each have a round 5 (`docs/explanation/rendezvous.md`), so rounds are compared by this.
    """
    return term * ROUNDS_OF_A_TERM + round_


class Starts(StrEnum):
    """How the next workers of a node start."""

    COLD = "cold"  # each imports what it needs
    PREPARING = "preparing"  # the node is new, and its fork server imports: its workers would wait for that
    WARM = "warm"  # forked from a process that has imported it
    READY = "ready"  # they have started, and can leave the round from its first moment (recovery in place)


class Node(Record):
    """One agent, as it introduces itself.

    `node_id` is new each time an agent starts; `preferred_rank` (`--node-rank`) identifies the node across restarts.
    """

    node_id: str
    host: str
    role: str
    local_world_size: int
    master_addr: str  # of its store, if it gets group rank 0; empty: where its connection comes from
    master_port: int
    preferred_rank: int | None = None
    way_address: str = ""  # the leader's address at which this node reached it
    peer_address: str = ""  # the source address of its connection
    starts: Starts = Starts.COLD
    vote_port: int = 0  # where the other nodes of its round ask its agent for its vote; 0: it has none
    log_name: str = ""  # of its memory of the log; empty: its node id
    unfit: str = ""  # why it does not take part in rounds for now


# Submitted by a supervisor.


class Ready(Record):
    """No worker of this node runs, and it wants the next round.  Answered by `Assigned` or `Ended`."""

    node: Node
    reached: Reached | None = None  # by its workers in the last round
    after: int | None = None  # the newest round that its supervisor had been assigned to

    def is_before(self, round_: int) -> bool:
        """Returns whether this precedes the round: the node does not know yet that it was assigned to it."""
        return self.after is not None and self.after < round_


class Failed(Record):
    """A worker of this node failed.  Answered by `Interrupted` or `Ended`, unless the round is over."""

    node_id: str
    round: int
    failure: ProcessFailure
    age_s: float = 0.0  # since its agent noticed it
    reached: Reached | None = None  # by its workers


class Succeeded(Record):
    """Every worker of this node succeeded.  Answered by `Ended`, or by `Interrupted` if the job restarts."""

    node_id: str
    round: int


class Left(Record):
    """This node's part is over, but the job's is not.  Not answered."""

    node_id: str
    reason: str
    age_s: float = 0.0  # since that was reported


class Prepared(Record):
    """A node that was ready and preparing no longer prepares; void once it takes part in a round.  Not answered.

    After `StartAhead`: its workers wait for the round, or could not be started ahead of it.
    """

    node_id: str
    starts: Starts


class OptedIn(Record):
    """All workers of this node can leave the round in place (recovery in place).  Not answered."""

    node_id: str
    round: int


class Hangs(Record):
    """A worker of this node hangs: all nodes must report what theirs do.  Answered by `Compared` if the round runs."""

    node_id: str
    round: int
    reason: str
    waited_s: float  # how long the node has waited for the worker already
    is_stopped: bool  # outliers must be stopped
    is_last: bool = False  # the node asked before and waits no longer: the answers so far are used
    number: int = 0  # how often this node has asked


class Saw(Record):
    """What the workers of this node do; sent after `Look`."""

    node_id: str
    round: int
    places: tuple[Place, ...]
    number: int = 0  # of the question that this answers


NodeMessage: TypeAlias = Ready | Failed | Succeeded | Left | Prepared | OptedIn | Hangs | Saw | Request | Query


class Terms(Record):
    """Options that must be the same for every agent of a job."""

    run_id: str
    min_nodes: int
    max_nodes: int
    max_restarts: int
    lease_s: float
    restart_policy: str = ""


class NodePhase(StrEnum):
    """State of a node, as the leader tracks it."""

    READY = "ready"  # waits for the next round
    BUSY = "busy"  # its workers run
    STOPPING = "stopping"  # its workers are stopping, for the next round
    FAILED = "failed"  # a worker failed, and the leader has not answered yet
    FINISHED = "finished"  # its workers succeeded


class Past(Record):
    """A node's part in the last round that it was assigned to."""

    phase: NodePhase
    round: int = 0  # 0: none yet
    term: int = 0  # of the leader that began it
    failure: ProcessFailure | None = None  # its first in that round
    failure_age_s: float = 0.0  # since its agent noticed the failure
    has_spares: bool = False  # nodes waited for a place in that round
    # Since it lost its last leader, or the first one after it had ended that round on its own or `is_charged` was set.
    alone_s: float = 0.0
    ended: Cause | None = None  # the free cause of that round's end, if it knows of one
    is_charged: bool = False  # it knows that a failure has ended that round
    reached: Reached | None = None  # by its workers, once one has failed or they have ended
    has_opted_in: bool = False  # its workers can leave that round in place
    restart_count: int = 0  # of the job, the highest that this node knows of

    @property
    def fence(self) -> int:
        """The fencing number of that round, which tells it from another one of the same number."""
        return fence_of(self.term, self.round)


# Node to leader.


class Status(Record):
    """The state of a node: everything that its leader must know.  Sent first on each connection, and on each change.

    A request stays in the status until its answer has been read, or, if it lasts, until it is done.
    """

    node: Node
    past: Past
    ready_count: int = 0  # how often it has been ready for a round; once it is ready again, it may be assigned again
    prepared_count: int = 0  # how often it has reported how its workers will start
    asks: tuple[Ask, ...] = ()
    frozen: Frozen | None = None  # its progress with an announced interruption
    saved: Saved | None = None
    question: Hangs | None = None  # one of its workers hangs
    places: Saw | None = None  # what its workers do, when the leader last asked
    left: Left | None = None
    log: log.Status | None = None  # what it knows of the job's log; `None`: its own agent leads

    @property
    def starts(self) -> int:
        """Identifies a request to start ahead, so each counts once; changes when the node is ready or `Prepared`."""
        return self.ready_count + self.prepared_count


class Hello(Record):
    """The first message on a connection.  Answered by `Plan` or `Refused`.

    Args:
        token: the leader's token, as in the cell or its campaign.
        name: the name of this node in the log.
    """

    protocol: int
    terms: Terms
    token: str
    name: str
    status: Status


class Alive(Record):
    """Heartbeat of a node.  Not answered."""


class HungUp(Record):
    """This node closes the connection, but lives: it may vote for another leader."""


Upward: TypeAlias = Hello | Status | Alive | HungUp | Fetch | Fetched


# Delivered to a supervisor.


class Assigned(Record):
    """A round is complete and this node takes part in it."""

    round: int
    restart_count: int
    ranks: NodeRanks
    master_addr: str
    master_port: int
    store_server: str = "agent"  # one of `STORE_SERVERS`
    term: int = 0  # of the leader that began the round; 0: there are no leaders

    @property
    def fence(self) -> int:
        return fence_of(self.term, self.round)


class Interrupted(Record):
    """The round is over: stop the workers, then be `Ready` for the next one."""

    round: int
    decision: Decision
    restart_count: int = 0  # of the round to come, unless the failure turns out to be a victim's
    went_on: bool = False  # the job continued without this node: another round raised the count
    in_place: bool = False  # workers keep their processes: all workers of the job have opted in


class Outcome(StrEnum):
    SUCCEEDED, FAILED = "succeeded", "failed"
    TIMED_OUT = "timed out"  # too few nodes came
    STOPPED, KILLED, SAVED = "stopped", "killed", "saved"  # requested by somebody; the last one after all had saved
    REPLACED = "replaced"  # for one node only: another agent joined with its node rank


class Ended(Record):
    """The job is over: its verdict, the same for every node."""

    outcome: Outcome
    decision: Decision
    cause: ProcessFailure | None = None


class Settled(Record):
    """What the end of the previous round cost, for nodes that were sent another cause."""

    round: int
    decision: Decision


class StartAhead(Record):
    """The running round can be left in place: start the workers before it takes this node in.

    Answered by `Prepared`, unless a round takes the node in before that.

    Args:
        number: `Status.starts` of the node at that time: one that was ready again, or has answered, is sent a new one.
    """

    number: int = 0


class Look(Record):
    """A worker of the round hangs: report what yours do, before anything is stopped.  Answered by `Saw`."""

    round: int
    reason: str
    number: int = 0  # of the question, in this round


class Compared(Record):
    """What workers of all nodes do, compared."""

    round: int
    text: str
    outliers: tuple[int, ...]  # ranks that the others wait for; empty if that is unclear
    is_stopped: bool  # these must be stopped, and have failed
    waited_s: float = 0.0  # how long the job has stood still
    number: int = 0  # of the question that this answers


LeaderMessage: TypeAlias = Assigned | Interrupted | Ended | Settled | Waiting | StartAhead | Look | Compared | Reply


# Leader to node.


class Plan(Record):
    """Everything that a node must do, as its leader sees it now.  What a node has done already changes nothing.

    Args:
        term: the leader's term.
        lease_s: after this many seconds of silence, a node or leader is lost.
        log: what it must know of the job's log; `None`: its own agent leads.
        assigned: take part in this round, with these ranks.
        interrupted: that round is over: stop its workers, or let them leave it in place.
        settled: what the end of the previous round cost, if that differs from what was sent first.
        ended: the job is over, or this node's part in it.
        waiting: what this node waits for.
        starts_ahead: start workers before a round takes this node in, if this is its `Status.starts`.
        look: report what the workers do, in `Status.places`.
        compared: what all workers of the round do.
        notice: an interruption is announced, or called off.
        cordoned: this node is cordoned.
        answers: to requests of this node, until its status shows that it has read them.
    """

    term: int
    lease_s: float
    log: log.Plan | None = None
    assigned: Assigned | None = None
    interrupted: Interrupted | None = None
    settled: Settled | None = None
    ended: Ended | None = None
    waiting: Waiting | None = None
    starts_ahead: int = 0
    look: Look | None = None
    compared: Compared | None = None
    notice: Notice | None = None
    cordoned: Cordoned | None = None
    answers: tuple[Answer, ...] = ()


class Refused(Record):
    """The node cannot take part.  The form of this message stays the same in every version of the protocol."""

    reason: str
    is_final: bool  # retrying cannot help: the command line or the version of the node is wrong


class Heartbeat(Record):
    """The leader lives, and has renewed the cell this many times."""

    has_spares: bool = False  # nodes wait for a place in the running round
    renewals: int = 0


class Probe(Record):
    """Asks for a sign of life.  Answered by `Alive`, at once."""


class GivenUp(Record):
    """The leader closes the connection, but lives: this node was silent for a lease."""


class Goodbye(Record):
    """This agent no longer leads."""

    reason: str
    is_gone: bool  # its agent leaves; otherwise another agent leads, and its node stays in its round


# A query is not part of status and plan: the leader forwards it and its answers.
Downward: TypeAlias = Plan | Refused | GivenUp | Heartbeat | Probe | Goodbye | Answer | Show | Shown


class LeaderAt(Record):
    """An agent that leads, or wants to.

    Args:
        name: the name of its node in the log.
        addresses: hosts where it listens, in the order in which others try them.
        token: identifies the agent that a connection is meant for: no two candidates have the same one.
    """

    node_id: str
    name: str
    addresses: tuple[str, ...]
    port: int
    token: str


# Between a candidate and a voter, on their own connection.


class Campaign(Record):
    """Asks a node for its vote.  The node connects and sends its status, or answers with `Declined`.

    Args:
        term: 0 only asks who leads.
        committed: the newest entry that the candidate knows to be committed.
    """

    term: int
    committed: EntryId | None
    leader: LeaderAt


class Declined(Record):
    """Answers `Campaign`: this node does not follow the candidate.

    Args:
        term: the highest term that it knows of.
        leader: the leader that it follows, if any.
        is_own: its own agent leads, so that leader lives.
    """

    term: int
    reason: str
    leader: LeaderAt | None = None
    is_own: bool = False


OfCampaign: TypeAlias = Campaign | Declined


# Kept by the endpoint.


class StoredCell(Record):
    """The endpoint's cell, and where its leader is; `None`: nobody leads any more."""

    cell: Cell
    leader: LeaderAt | None = None
    protocol: int = PROTOCOL  # an agent of another version reads why it cannot take part


Stored: TypeAlias = StoredCell
