"""Messages about requests to a running job, and about an interruption that is announced.

A node asks (`Ask`), and is answered (`Answer`).  What the coordinator then wants of all nodes is a `Notice`; they say
how far they are with it (`Frozen`, `Saved`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeAlias

from aelastic.core.record import Record

# Node to coordinator.


class Verb(StrEnum):
    DRAIN = "drain"  # a node is about to go: it leaves in order, once all ranks of the job have saved
    CANCEL = "cancel"  # it stays after all


class Ask(Record):
    """A request to the running job: decided once, by its id.  Answered by `Answer`."""

    node_id: str
    ask_id: str
    verb: Verb
    target: str  # nodes, by host or id; empty: the one that asks
    deadline_s: float  # of a drain: from now on, until the nodes must be gone
    reason: str


class Frozen(Record):
    """No rank of this node goes beyond its next call of `notice.due`, after `Notice` has said so."""

    node_id: str
    notice_id: int
    calls: int  # the most of a rank
    pages: int  # ranks that have called it
    save_at: int  # the call that was named before, if ranks may stand at it; 0: none


class Saved(Record):
    """Each rank of this node has saved, or has ended."""

    node_id: str
    notice_id: int


Request: TypeAlias = Ask | Frozen | Saved


# Coordinator to node.


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
    reason: str = ""


class Answer(Record):
    """What has become of a request."""

    ask_id: str
    is_applied: bool
    text: str
