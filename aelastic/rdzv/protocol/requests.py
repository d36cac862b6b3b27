"""Messages about requests to a running job, and about announced interruptions.

A node sends a request (`Ask`) and receives an `Answer`.  The leader then sends all nodes a `Notice`, and they report
their progress (`Frozen`, `Saved`).  The leader forwards a node's query (`Fetch`) to the others, and their answers
(`Fetched`) back to it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from aelastic.base.record import Record
from aelastic.rdzv.decisions.cause import Cause

# Node to leader.


class Verb(StrEnum):
    DRAIN = "drain"  # a node leaves in order, once all ranks of the job have saved
    CANCEL = "cancel"  # that node stays after all
    RESTART = "restart"  # the workers of all nodes end, and the next round begins
    STOP = "stop"  # the job ends
    KILL = "kill"  # the job ends, and its workers are killed at once
    CORDON = "cordon"  # a host's nodes do not take part in rounds for some time
    UNCORDON = "uncordon"  # they may take part again


REASON_MAX = 1_000  # characters; longer reasons are cut
DEADLINE_MIN_S = 1.0  # the least time to save in; a shorter notice is a stop


class Ask(Record):
    """A request to the running job, decided once for each id.  Answered by `Answer`."""

    node_id: str
    ask_id: str
    verb: Verb
    target: str  # nodes, by host or id; empty: the requesting node
    deadline_s: float  # of a drain or a save: seconds from now until the nodes must be gone
    reason: str
    round: int = 0  # of a restart: the round that must end
    at_save: bool = False  # of a restart or a stop: once all ranks have saved
    spares_job: bool = False  # of a drain: refused if it would end the job


class Frozen(Record):
    """After a `Notice`: no rank of this node goes past its next call of `notice.due`."""

    node_id: str
    notice_id: int
    calls: int  # of the foremost rank
    pages: int  # how many ranks have called it
    save_at: int  # the call that was named before, if ranks may be waiting there; 0: none
    has_opted_in: bool = False  # its workers can leave the round in place


class Saved(Record):
    """Each rank of this node has saved, or has ended."""

    node_id: str
    notice_id: int


class What(StrEnum):
    STATUS = "status"
    STACKS = "stacks"
    LOG = "log"
    WHY = "why"


class Fetch(Record):
    """A node queries others.  Answered by `Answer`, then by one or more `Shown` from each of them."""

    node_id: str
    ask_id: str
    what: What
    target: str = ""  # one node, by its id; empty: all
    rank: int = -1  # of a log
    is_stderr: bool = False
    offset: int = -1  # in its file; -1: near its end


class Fetched(Record):
    """A node's answer to `Show`, in one or more parts."""

    node_id: str
    asker: str
    ask_id: str
    key: str  # of stacks: the rank
    value: str
    is_last: bool = True
    is_refused: bool = False  # the value is the reason
    is_continued: bool = False  # the value continues that of the previous message: a text has a limit


Request: TypeAlias = Ask | Frozen | Saved
Query: TypeAlias = Fetch | Fetched


# Leader to node.


class Stage(StrEnum):
    FREEZE = "freeze"  # no rank goes past its next call.  Answered by `Frozen`
    SAVE = "save"  # ranks continue, and save at the named call.  Answered by `Saved`
    LEAVE = "leave"  # this node leaves now
    NONE = "none"  # called off


class Notice(Record):
    """An interruption is announced, or called off."""

    notice_id: int  # rises each time that ranks are paused again
    round: int
    stage: Stage
    save_at: int = 0  # 0: no call could be agreed
    is_signalled: bool = False  # no rank has called `notice.due`: workers with a handler get the drain signal
    kill_s: float = 0.0  # seconds from now until workers that still run are killed
    cause: Cause | None = None
    verb: Verb = Verb.DRAIN  # the purpose: a node leaves, or the job restarts or stops


# The reply of a leader that has just taken over: a query a moment later reaches more nodes.
STILL_COMING = "nodes have yet to find this leader"


ONE_NODE = "the job has one node, which cannot be cordoned"


class Answer(Record):
    """The leader's answer to a request or a query."""

    ask_id: str
    is_applied: bool
    text: str
    nodes: tuple[str, ...] = ()  # those that received the query


class Show(Record):
    """A query of another node, or of this one.  Answered by `Fetched`."""

    fetch: Fetch


class Shown(Record):
    """A node's answer to a query, forwarded to the node that sent it."""

    fetched: Fetched


class Cordoned(Record):
    """This node is cordoned for `again_s` seconds, and may then be ready again; 0: it is uncordoned."""

    reason: str
    again_s: float
    number: int = 0  # how often it was cordoned, or uncordoned


Reply: TypeAlias = Notice | Answer | Show | Shown | Cordoned
