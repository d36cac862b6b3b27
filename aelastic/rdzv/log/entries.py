"""Entries of the log, on which nodes agree one after the other.

Each entry names its parent, so the last one identifies the whole log up to it.  It also names who decides on the next
entry: its voters, and the incarnation of each endpoint.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple, NewType, TypeAlias

from aelastic.base.record import Record

# What an entry is about; opaque to the log.
Payload = NewType("Payload", str)
NO_PAYLOAD = Payload("")
# How many charged failures an entry remembers.  Nodes don't report failures of earlier rounds, so a few would suffice.
CHARGED_MAX = 32


class EntryId(NamedTuple):
    """Identifies an entry.

    Args:
        log: a name that all entries of one log share.
        number: the position in the log.  It rises with each entry, so an entry that only changes voters is newer as
            well.
    """

    term: int
    number: int
    log: str
    digest: str


class Configuration(NamedTuple):
    """Who decides on an entry.

    Args:
        voters: nodes.  Without any, the endpoints decide alone: several endpoints, etcd, `static`.
        incarnations: one for each endpoint; "" for an endpoint that has never answered.
    """

    voters: tuple[str, ...]
    incarnations: tuple[str, ...]


class Entry(Record):
    """A round, or the verdict.  `first_entry` and `next_entry` make them.

    Args:
        parent: the entry before it; `None` if this one founded the log.
        term: the term of the leader that first proposed it.
        charged: the failures for which this entry and earlier ones have charged a restart, newest last.
        payload: what the round is about; opaque to the log.
    """

    id: EntryId
    parent: EntryId | None
    term: int
    number: int
    members: tuple[str, ...]
    voters: tuple[str, ...]
    incarnations: tuple[str, ...]
    is_verdict: bool
    charged: tuple[str, ...]
    payload: Payload

    @property
    def log(self) -> str:
        return self.id.log

    @property
    def configuration(self) -> Configuration:
        return Configuration(self.voters, self.incarnations)

    # The digest covers all other fields.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, Entry) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)


# An entry, or only its id if the entry itself was never seen.
EntryRef: TypeAlias = Entry | EntryId


class Accepted(Record):
    """An entry that a voter has accepted, and the term of the leader that proposed it then."""

    entry: Entry
    term: int


def first_entry(
    term: int,
    members: Iterable[str],
    voters: Iterable[str],
    incarnations: tuple[str, ...],
    payload: Payload = NO_PAYLOAD,
) -> Entry:
    """Returns the entry that founds a log, which is named after the incarnations of the endpoints that agree on it."""
    return _entry("+".join(incarnations), None, term, 1, members, voters, incarnations, payload=payload)


def next_entry(
    parent: Entry,
    term: int,
    members: Iterable[str],
    voters: Iterable[str],
    incarnations: tuple[str, ...],
    *,
    is_verdict: bool = False,
    failures: Iterable[str] = (),
    payload: Payload = NO_PAYLOAD,
) -> Entry:
    """Returns the entry after `parent`.  It charges those `failures` that no entry has charged yet."""
    charged = (*parent.charged, *not_charged(parent, failures))[-CHARGED_MAX:]
    position = parent.log, parent.id, term, parent.number + 1
    return _entry(*position, members, voters, incarnations, is_verdict=is_verdict, charged=charged, payload=payload)


def _entry(
    log: str,
    parent: EntryId | None,
    term: int,
    number: int,
    members: Iterable[str],
    voters: Iterable[str],
    incarnations: tuple[str, ...],
    *,
    is_verdict: bool = False,
    charged: tuple[str, ...] = (),
    payload: Payload = NO_PAYLOAD,
) -> Entry:
    names = tuple(sorted(members)), tuple(sorted(voters))
    fields = parent, term, number, *names, incarnations, is_verdict, charged, payload
    digest = blake2b(repr((log, fields)).encode(), digest_size=12).hexdigest()
    return Entry(EntryId(term, number, log, digest), *fields)


def not_charged(parent: Entry, failures: Iterable[str]) -> tuple[str, ...]:
    """Charged once: the first entry that names a failure charges it, so reports of the failure may be repeated."""
    return tuple(failure for failure in failures if failure not in parent.charged)


def id_of(entry: EntryRef | None) -> EntryId | None:
    return entry.id if isinstance(entry, Entry) else entry


def log_of(ref: EntryRef | None) -> str | None:
    entry_id = id_of(ref)
    return entry_id.log if entry_id else None


def is_verdict(ref: EntryRef | None) -> bool:
    return isinstance(ref, Entry) and ref.is_verdict


def order(entry: EntryRef | None) -> tuple[int, int]:
    """Returns (term, number), which rises along each log.  Nothing comes before the first entry."""
    return (entry.id[:2] if isinstance(entry, Entry) else entry[:2]) if entry else (-1, -1)


def whole(ref: EntryRef | None, *held: Entry | None) -> EntryRef | None:
    """Returns the entry with this id if it is among those held, otherwise the id."""
    if isinstance(ref, EntryId):
        return next((entry for entry in held if entry is not None and entry.id == ref), ref)
    return ref
