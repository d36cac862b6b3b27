"""Decisions as JSON: in the event log, and in an agent's status."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from aelastic.base.record import Record
from aelastic.base.renamed import with_new_names, with_old_names
from aelastic.rdzv.decisions.cause import Cause, CauseKind, SaveOutcome
from aelastic.rdzv.decisions.decision import Decision, DecisionKind

Json = dict[str, Any]
R = TypeVar("R", bound=Record)

_ENUMS: dict[str, type[StrEnum]] = {"saved": SaveOutcome}


def to_json(decision: Decision | None) -> Json | None:
    """Returns the fields that differ from their defaults, in the order of the value."""
    return None if decision is None else with_old_names("decision", _fields(decision))


def from_json(value: object) -> Decision | None:
    """Returns the decision that `to_json` made this from; `None` if there was none, or a newer aelastic wrote it.

    Raises:
        ValueError: it is damaged.
    """
    if value is None:
        return None
    cause = _read(Cause, CauseKind, value.get("cause") if isinstance(value, dict) else None)
    decision = _read(Decision, DecisionKind, with_new_names("decision", value) if isinstance(value, dict) else value)
    return None if cause is None or decision is None else decision.replace(cause=cause)


def _fields(record: Record) -> Json:
    defaults = type(record).defaults
    described: Json = {}
    for name in record.__match_args__:
        value = getattr(record, name)
        if isinstance(value, Record):
            described[name] = _fields(value)
        elif name not in defaults or value != defaults[name]:
            described[name] = (
                list(value) if isinstance(value, tuple) else str(value) if isinstance(value, StrEnum) else value
            )
    return described


def _read(kind: type[R], names: type[StrEnum], value: object) -> R | None:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r:.80} is not a {kind.__name__.lower()}")  # noqa: TRY004  as for all damage
    found = next((each for each in names if each == value.get("kind")), None)
    if found is None:
        return None
    defaults = kind.defaults
    known = {name: _like(defaults[name], each, name) for name, each in value.items() if name in defaults}
    needed: Json = {"kind": found} | ({"cause": None} if kind is Decision else {})
    return kind(**needed, **known)


def _like(default: Any, value: object, name: str) -> Any:
    """Returns the value in the type of the default."""
    if isinstance(default, StrEnum):
        return _ENUMS[name](str(value))
    if isinstance(default, tuple) and isinstance(value, list):
        item = int if name == "ranks" else str
        if all(type(each) is item for each in value):
            return tuple(value)
    elif (isinstance(default, float) and type(value) in {int, float}) or type(value) is type(default):
        return value
    raise ValueError(f"{name} is {value!r:.80}")
