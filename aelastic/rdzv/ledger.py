"""The record of how rounds have ended: how far workers came, what ended them, which restarts were spent.

The leader writes it when a round's end is settled, and sends it to each node with the next round; a leader
that takes over gets it from them.
"""

from __future__ import annotations

from aelastic.base.record import Record

# If no steps are reported, workers that lived this long have made progress.
LONG_LIFE_S = 60.0
COOL_DOWN_S, COOL_DOWN_MAX_S = 3600.0, 86400.0
EXCLUDED_MAX, SPENT_MAX = 64, 2000  # the second: 20 rules, of 100 restarts each
# A host that is blamed this often within a day is broken: an hour does not fix it, and each try restarts all nodes.
BLAMES, BLAME_WINDOW_S, BROKEN_S = 2, 86400.0, 7 * 86400.0
NONE, UNKNOWN = -1, -2


class Reached(Record):
    """How far the workers of a node were when they ended.

    `step` is by `--progress`: -1 if none was reported, -2 if it is not known (workers count from the beginning again,
    or their last output was not read yet).  `calls` are those of `notice.due`; -1 if there were none.
    """

    step: int = NONE
    calls: int = NONE
    life_s: float = 0.0


class Spent(Record):
    """A restart charged to a rule with its own budget."""

    rule: int  # its place, from 0
    at: float  # on the leader's clock; on the wire: seconds ago


class Excluded(Record):
    """A host whose nodes are cordoned for some time."""

    host: str
    at: float  # as above
    for_s: float
    why: str


class Blamed(Record):
    """One time that a host is proved to have caused a round's end."""

    host: str
    at: float  # as above
    is_loss: bool = False  # it was lost without notice


class Ledger(Record):
    """The record of all rounds of a job so far."""

    root: str = ""  # what ended the last round, if that can be proof (`failures.root_cause`)
    step: int = NONE  # the largest of all rounds
    calls: int = NONE  # of the last round that had some
    still: int = 0  # ends in a row without progress
    spent: tuple[Spent, ...] = ()
    excluded: tuple[Excluded, ...] = ()
    blamed: tuple[Blamed, ...] = ()

    def turned(self, now: float) -> Ledger:
        """Returns the ledger with ages instead of points in time, or the reverse."""
        if not (self.spent or self.excluded or self.blamed):
            return self
        return self.replace(
            spent=tuple(each.replace(at=max(0.0, now - each.at)) for each in self.spent),
            excluded=tuple(each.replace(at=max(0.0, now - each.at)) for each in self.excluded),
            blamed=tuple(each.replace(at=max(0.0, now - each.at)) for each in self.blamed),
        )

    def absent(self, now: float) -> dict[str, Excluded]:
        """Returns the hosts that are cordoned."""
        return {each.host: each for each in self.excluded if now < each.at + each.for_s}

    def exclude(self, host: str, why: str, now: float, for_s: float = 0.0) -> Ledger:
        """Returns the ledger with a host cordoned for a time (0: an hour, doubled each time, a day at most)."""
        kept = [each for each in self.excluded if now < each.at + each.for_s + COOL_DOWN_MAX_S][-EXCLUDED_MAX:]
        times = sum(each.host == host for each in kept)
        for_s = for_s or min(COOL_DOWN_S * 2.0 ** min(times, 16), COOL_DOWN_MAX_S)
        return self.replace(excluded=(*kept, Excluded(host, now, for_s, why)))

    def include(self, host: str) -> Ledger:
        """Returns the ledger with a host uncordoned and cleared of all blame."""
        return self.replace(
            excluded=tuple(each for each in self.excluded if each.host != host),
            blamed=tuple(each for each in self.blamed if each.host != host),
        )

    def blame(self, host: str, now: float, *, is_loss: bool = False) -> Ledger:
        """Returns the ledger with one more proved cause against a host."""
        kept = [each for each in self.blamed if now < each.at + BLAME_WINDOW_S]
        return self.replace(blamed=(*kept, Blamed(host, now, is_loss))[-EXCLUDED_MAX:])

    def is_broken(self, host: str, now: float, *, is_loss: bool = False) -> bool:
        """Returns whether a host is broken if it is the cause once more, now.

        Losses alone prove nothing: networks, spot markets and people take nodes away and give them back, for free.
        """
        losses = [each.is_loss for each in self.blamed if each.host == host and now < each.at + BLAME_WINDOW_S]
        return 1 + len(losses) >= BLAMES and not (is_loss and all(losses))

    def advance(self, reached: Reached, *, is_complete: bool) -> bool | None:
        """Returns whether a round came further than all before it; `None`: unknown.

        Args:
            reached: the furthest that its nodes have reported.
            is_complete: all of them have reported.
        """
        step, calls = reached.step, reached.calls
        if step == UNKNOWN:
            return None
        if step > self.step:
            return True
        if self.step > NONE:
            return False if step > NONE or is_complete else None
        if max(calls, self.calls) > NONE:
            # A script counts from 0 wherever it resumes: with fewer calls it may still have come further.
            return True if calls > self.calls else False if calls == self.calls and is_complete else None
        return reached.life_s >= LONG_LIFE_S

    def after(self, root: str, reached: Reached, *, is_complete: bool) -> Ledger:
        """Returns the ledger with the end of one more round; unknown values change nothing."""
        has_advanced = self.advance(reached, is_complete=is_complete)
        return self.replace(
            root=root,
            step=max(self.step, reached.step),
            calls=self.calls if reached.calls == NONE else reached.calls,
            still=self.still if has_advanced is None else 0 if has_advanced else self.still + 1,
        )

    def spent_by(self, rule: int, since: float) -> int:
        """Returns how many restarts a rule has spent since a point in time."""
        return sum(each.rule == rule and each.at > since for each in self.spent)

    def spend(self, rule: int, now: float, window_s: float) -> Ledger:
        """Returns the ledger with one more restart of a rule, and without those that are older than its window."""
        kept = (each for each in self.spent if each.rule != rule or each.at > now - window_s)
        return self.replace(spent=(*kept, Spent(rule, now)))


def most_of(*reached: Reached | None) -> Reached:
    """Returns how far a round was, from its nodes' reports; the step is unknown if one node does not know its own."""
    known = [each for each in reached if each is not None]
    return Reached(
        UNKNOWN if not known or any(each.step == UNKNOWN for each in known) else max(each.step for each in known),
        max((each.calls for each in known), default=NONE),
        max((each.life_s for each in known), default=0.0),
    )
