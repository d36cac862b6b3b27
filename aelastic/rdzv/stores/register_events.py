"""The events and actions of a quorum's register.

Answers carry the number of the step that asked; answers to an earlier step change nothing.
"""

from __future__ import annotations

from typing import TypeAlias

from aelastic.base.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  also an event of this core
from aelastic.base.record import Record
from aelastic.rdzv.stores.register_cells import StoreCell

# Events.


class Requested(Record):
    """The caller wants to replace the text, and to learn the text afterwards; `new` is `None` to read only."""

    expected: bytes = b""
    new: bytes | None = None


class Dropped(Record):
    """The caller no longer waits; the text may or may not have been replaced."""


class Looked(Record):
    """Answers `Look` with the store's cell; `None`: it has none."""

    step: int
    store: int
    cell: StoreCell | None


class Written(Record):
    """Answers `Write`: whether the store had the expected cell, and now has the new one."""

    step: int
    store: int
    is_done: bool


class Unanswered(Record):
    """Answers `Look` and `Write`: the store cannot be reached now; the request may or may not have taken effect."""

    step: int
    store: int
    reason: str


Event: TypeAlias = Requested | Dropped | Looked | Written | Unanswered | DeadlinePassed

# Actions.


class Look(Record):
    """Read a cell.  Answered by `Looked` or `Unanswered`, perhaps late, or never."""

    step: int
    store: int


class Write(Record):
    """Replace a cell by another, if it is the expected one.  Answered by `Written` or `Unanswered`, or never."""

    step: int
    store: int
    expected: StoreCell | None
    cell: StoreCell


class Done(Record):
    """Answers `Requested` with the text of the register, which is the new one if that was written.

    Another text does not prove that the new one was never there: an agent may have found it in a store that a failed
    try had reached, and replaced it.
    """

    text: bytes


class NoMajority(Record):
    """Answers `Requested`: too few stores could be reached; the text may or may not have been replaced.

    Args:
        missing: the stores that did not answer, with the reason; "" for a silent one.
        forgetful: the stores that answered, but have forgotten a job that was known before.
    """

    missing: dict[int, str]
    forgetful: tuple[int, ...] = ()


Action: TypeAlias = Look | Write | Done | NoMajority
