"""Fields that were renamed in what users read: the event log, the status, and what commands print as JSON.

For one minor version, the old name is written beside the new one, with the same value.  Readers accept either.  A row
is removed with the version that it names; `docs/reference/event-log.md` lists the rows for users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Renamed(NamedTuple):
    """A field that has a new name."""

    where: str  # the JSON object with the field: an event of the event log, or a field that holds the object
    old: str
    new: str
    removed_in: str  # the first version without the old name


RENAMED = (
    Renamed("compared", "odd", "outliers", "0.2"),
    Renamed("decision", "seats", "nodes", "0.2"),
    Renamed("rehearsals", "holds", "passed", "0.2"),
)


def with_old_names(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an object, and their old names with the same values."""
    return {**fields, **{each.old: fields[each.new] for each in RENAMED if each.where == where and each.new in fields}}


def with_new_names(where: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of an object under their new names, whichever version wrote it."""
    found = dict(fields)
    for each in RENAMED:
        if each.where == where and each.old in found:
            value = found.pop(each.old)
            found.setdefault(each.new, value)
    return found
