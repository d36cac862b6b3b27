"""Messages about requests to a running job, and about an interruption that is announced.

A node asks (`Ask`), and is answered (`Answer`).  What the leader then wants of all nodes is a `Notice`; they say
how far they are with it (`Frozen`, `Saved`).  What a node wants to see of others (`Fetch`) is passed on to them, and
what they show (`Fetched`) to it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from aelastic.core.record import Record
from aelastic.decisions.cause import Cause

# Node to coordinator.


class Verb(StrEnum):
    DRAIN = "drain"  # a node is about to go: it leaves in order, once all ranks of the job have saved
    CANCEL = "cancel"  # it stays after all
    RESTART = "restart"  # the workers of all nodes end, and the next round begins
    STOP = "stop"  # the job ends
    KILL = "kill"  # as above, and its workers are not asked to
    CORDON = "cordon"  # a host's nodes take part in no round for some time
    UNCORDON = "uncordon"  # they may take part again


REASON_MAX = 1_000  # characters; what is longer is cut
DEADLINE_MIN_S = 1.0  # to save in: a shorter notice is a stop


class Ask(Record):
    """A request to the running job: decided once, by its id.  Answered by `Answer`."""

    node_id: str
    ask_id: str
    verb: Verb
    target: str  # nodes, by host or id; empty: the one that asks
    deadline_s: float  # of a drain, or a save: from now on, until the nodes must be gone
    reason: str
    round: int = 0  # of a restart: which is to end
    at_save: bool = False  # of a restart, or a stop: once all ranks have saved
    spares_job: bool = False  # of a drain: refused where the job would end by it


class Frozen(Record):
    """No rank of this node goes beyond its next call of `notice.due`, after `Notice` has said so."""

    node_id: str
    notice_id: int
    calls: int  # the most of a rank
    pages: int  # ranks that have called it
    save_at: int  # the call that was named before, if ranks may stand at it; 0: none
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
    """A node wants to see something of others.  Answered by `Answer`, and then by what each of them has `Shown`."""

    node_id: str
    ask_id: str
    what: What
    target: str = ""  # one node, by its id; empty: all
    rank: int = -1  # of a log
    is_stderr: bool = False
    offset: int = -1  # in its file; -1: near its end


class Fetched(Record):
    """What a node shows, after `Show`; the last of one answer says so."""

    node_id: str
    asker: str
    ask_id: str
    key: str  # of stacks: the rank
    value: str
    is_last: bool = True
    is_refused: bool = False  # the value says why
    is_continued: bool = False  # the value goes on where that of the message before ended: a text has a limit


Request: TypeAlias = Ask | Frozen | Saved
Enquiry: TypeAlias = Fetch | Fetched


# Leader to node.


class Stage(StrEnum):
    FREEZE = "freeze"  # no rank goes beyond its next call.  Answered by `Frozen`
    SAVE = "save"  # ranks go on, and save at the call that is named.  Answered by `Saved`
    LEAVE = "leave"  # this node leaves now
    NONE = "none"  # called off


class Notice(Record):
    """An interruption is announced, or called off."""

    notice_id: int  # higher each time that ranks are held anew
    round: int
    stage: Stage
    save_at: int = 0  # 0: no call could be agreed
    is_signalled: bool = False  # no rank has called `notice.due`: workers with a handler get the drain signal
    kill_s: float = 0.0  # from now on, until workers that have not ended are killed
    cause: Cause | None = None
    verb: Verb = Verb.DRAIN  # what for: a node leaves, or the job restarts, or stops


# What a leader says that has just taken over: who asks again a moment later is told of more.
STILL_COMING = "nodes have yet to find this leader"


ONE_NODE = "the job has one node, which cannot be cordoned"


class Answer(Record):
    """What has become of a request."""

    ask_id: str
    is_applied: bool
    text: str
    nodes: tuple[str, ...] = ()  # that have been asked to show something


class Show(Record):
    """Another node, or this one, wants to see something.  Answered by `Fetched`."""

    fetch: Fetch


class Shown(Record):
    """What a node has shown."""

    fetched: Fetched


class Cordoned(Record):
    """This node is cordoned for some time, and may be ready again then.  At 0: it is uncordoned."""

    reason: str
    again_s: float
    number: int = 0  # how often it was cordoned, or uncordoned


Reply: TypeAlias = Notice | Answer | Show | Shown | Cordoned
