"""Which ranks hang: compares the places of all workers of a job.

When a job stalls, most ranks wait in the same collective; the ranks to look at are those that do not.  A wrongly named
rank costs a person hours, so "cannot tell", with a list of the groups, is also an answer.

1. Ranks are grouped by where their script is, and by the collective that they wait in.
2. If at least half of the ranks wait in collectives, those that do not are the **outliers**.
3. Otherwise, or if all wait, those outside the one group that has more than half of the ranks.
4. Otherwise those that have done fewer steps than all others, if every rank reports its steps.

A rank of which nothing is known is never named.  Others are not named either where it could be the outlier: by rules 3
and 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from aelastic.base.record import Record

# How many ranks, and groups, a sentence names.
NAMED_MAX = 4
# How much of each text of a place is sent to other nodes (`rdzv.protocol.sense`).
TEXT_CHARS_MAX = 255

_STATES = {
    "R": "is running",
    "D": "waits for a disk (D)",
    "T": "is stopped (T)",
    "t": "is stopped by a debugger (t)",
    "lock": "waits for a lock",
    "S": "sleeps",
}


class Place(Record):
    """Where a worker is, summarized from its stack."""

    rank: int
    host: str
    pid: int
    at: str = ""  # the innermost frame of the user's code, as in "train.py:120"
    call: str = ""  # the innermost call, as in "read (dataset.py:88)"; the same place as `at` if that is innermost
    collective: str = ""  # the one that it waits in
    state: str = ""  # the kernel's state of its main thread: one letter, or "lock"
    steps: int = -1  # how many it has done; -1 if unknown
    ended: str = ""  # how it has ended, if it has
    unknown: str = ""  # why nothing is known

    @property
    def for_others(self) -> Place:
        """The place as other nodes receive it, with texts cut to the limit."""
        texts = {
            name: getattr(self, name)[:TEXT_CHARS_MAX] for name in ("at", "call", "collective", "ended", "unknown")
        }
        return self.replace(**texts)

    @property
    def group(self) -> str:
        """Key shared by all ranks at the same place, worded for use in a message."""
        if self.unknown:
            return f"unknown ({self.unknown})"
        if self.ended:
            return self.ended
        if self.collective:
            return f"{self.collective} ({self.at})" if self.at else self.collective
        return self.call or self.at

    @property
    def sentence(self) -> str:
        """A description of the place that can follow "does not:"."""
        state = "" if self.ended else _STATES.get(self.state, "")
        return ", ".join(each for each in (self.group, state) if each)


class Comparison(Record):
    """The result of comparing all ranks."""

    text: str
    outliers: tuple[int, ...] = ()  # ranks to look at; empty if that is unclear


def compare(places: Iterable[Place], waited_s: float = 0.0) -> Comparison:
    """Names the ranks that the others wait for, if that is clear.

    Args:
        places: the places of all ranks, in any order.
        waited_s: how long the job has stalled; less than 1 is not mentioned, and 0 means that it may not have stalled.
    """
    what = "hang" if waited_s else "ranks compared"
    ranks = sorted(places, key=lambda place: place.rank)
    outliers, most = _outliers_of(
        [place for place in ranks if not place.unknown], has_unknown=any(p.unknown for p in ranks)
    )
    since = f" for {waited_s:.0f} s" if waited_s >= 1 else ""
    if len(ranks) == 1:
        return Comparison(f"{what}{since}: rank {ranks[0].rank} on {ranks[0].host}: {ranks[0].sentence}")
    if not outliers:
        return Comparison(f"{what}{since}: cannot tell which rank the others wait for; {_groups_of(ranks)}")
    same = {place.group for place in most}
    does = ("waits in" if len(most) == 1 else "wait in") if all(place.collective for place in most) else "are at"
    where = f"{does} {same.pop() if len(same) == 1 else 'collectives'}"
    text = f"{what}: {len(most)} of {len(ranks)} ranks {where}{since}; "
    named = [
        f"rank {place.rank} on {place.host} {_differs(place, most)}: {place.sentence}" for place in outliers[:NAMED_MAX]
    ]
    more = [f"{len(outliers) - NAMED_MAX} more do not"] if len(outliers) > NAMED_MAX else []
    return Comparison(text + "; ".join(named + more), tuple(place.rank for place in outliers))


def _differs(place: Place, most: Sequence[Place]) -> str:
    """Returns how a rank differs from most others."""
    if any(place.group == other.group for other in most):
        return f"has done {place.steps} steps, the others {most[0].steps}"
    return "does not"


def _outliers_of(known: Sequence[Place], *, has_unknown: bool) -> tuple[list[Place], list[Place]]:
    """Returns the ranks to look at, and the majority; ([], []) if that is unclear."""
    waiting = [place for place in known if place.collective and not place.ended]
    others = [place for place in known if place not in waiting]
    if others and len(waiting) >= len(others):
        return others, waiting
    groups = Counter(place.group for place in known)
    group, count = max(groups.items(), key=lambda each: each[1], default=("", 0))
    most = [place for place in known if place.group == group]
    if 2 * count > len(known) and count < len(known) and not has_unknown:
        return [place for place in known if place.group != group], most
    steps = {place.steps for place in known}
    if has_unknown or -1 in steps or len(steps) != 2:
        return [], []
    behind = [place for place in known if place.steps == min(steps)]
    ahead = [place for place in known if place.steps == max(steps)]
    return (behind, ahead) if len(behind) < len(ahead) else ([], [])


def _groups_of(ranks: Sequence[Place]) -> str:
    groups: dict[str, list[int]] = {}
    for place in ranks:
        groups.setdefault(place.group or "an unknown place", []).append(place.rank)
    largest = sorted(groups.items(), key=lambda each: -len(each[1]))
    words = [f"{ranks_in_words(numbers)}: {group}" for group, numbers in largest[:NAMED_MAX]]
    rest = sum(len(numbers) for _, numbers in largest[NAMED_MAX:])
    return "; ".join([*words, f"{rest} more elsewhere"] if rest else words)


def ranks_in_words(numbers: Sequence[int], most: int = NAMED_MAX) -> str:
    """Returns words such as "rank 3", or "ranks 0, 1, 2, 3 and 4 more"."""
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return f"rank{'s' if len(numbers) != 1 else ''} {', '.join(map(str, numbers[:most]))}{more}"
