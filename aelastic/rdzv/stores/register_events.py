"""The events of a quorum's register, and its actions.

Answers carry the number of the step that asked: those to an earlier one change nothing.
"""

from __future__ import annotations

from typing import TypeAlias

from aelastic.core.machine import DeadlinePassed as DeadlinePassed  # noqa: PLC0414  an event of this core, too
from aelastic.core.record import Record
from aelastic.rdzv.stores.register_cells import Cell

# Events.


class Asked(Record):
    """The caller wants a text replaced, and to know the text then; `new` is `None` to read only."""

    expected: bytes = b""
    new: bytes | None = None


class Dropped(Record):
    """The caller does not wait any more; the text was replaced, or not."""


class Looked(Record):
    """Answers `Look`: what the store has; `None`: nothing."""

    step: int
    store: int
    cell: Cell | None


class Written(Record):
    """Answers `Write`: whether the store had what was expected, and has the new cell now."""

    step: int
    store: int
    is_done: bool


class Unanswered(Record):
    """Answers `Look` and `Write`: the store cannot be asked now; what was asked has been done, or not."""

    step: int
    store: int
    reason: str


Event: TypeAlias = Asked | Dropped | Looked | Written | Unanswered | DeadlinePassed

# Actions.


class Look(Record):
    """Read a cell.  Answered by `Looked` or `Unanswered`, sooner or later or never."""

    step: int
    store: int


class Write(Record):
    """Replace a cell by another, if it is the expected one.  Answered by `Written` or `Unanswered`, or never."""

    step: int
    store: int
    expected: Cell | None
    cell: Cell


class Done(Record):
    """Answers `Asked`: the text of the register; it is the new one if that was written.

    Another text does not say that the new one never was there: an agent may have found it in a store that a failed try
    had reached, and have replaced it.
    """

    text: bytes


class NoMajority(Record):
    """Answers `Asked`: too few stores could be asked; the text was replaced, or not.

    Args:
        missing: the stores that did not answer, each with the reason; "" for one that was silent.
        forgetful: those that answered, and know nothing of a job that was known before.
    """

    missing: dict[int, str]
    forgetful: tuple[int, ...] = ()


Action: TypeAlias = Look | Write | Done | NoMajority
