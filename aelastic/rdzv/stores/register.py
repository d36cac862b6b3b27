"""A register with compare-and-set, kept in N stores, each of which offers compare-and-set on one cell.

An operation is a series of tries, each with its own ballot, in three steps over the stores in parallel:

1. **Look** at the cells.  The newest vote whose members are a majority of the cells seen is the basis.
2. **Lock** each cell that was seen: compare-and-set from exactly that cell, to the same with our promise.
3. **Write** the new vote: compare-and-set from exactly the locked cell.  Once a majority has the vote, it holds.

A step begins when the previous one has ended, and a cell that failed one step is not asked again in the same try.  So
there was a moment between looking and locking when all locked cells were as seen, and one between locking and writing
when all were locked.  Two tries share a store, and one of them came first there: either the later one has seen the vote
of the earlier, or the earlier one has failed.  So each vote that was ever sent descends from each older vote that held.
This is CASPaxos (Rystsov, 2018) with a snapshot.

**Stores that forget.**  A vote names the incarnations of its members.  A store that came back empty, or with a cell of
an earlier incarnation, is not a member, and no majority counts it.  A try that finds such a store locks it under a new
incarnation, and names that incarnation in its vote, which needs a majority of the previous members.  So everything
known of the time before the loss comes from a majority that had not lost it.

**The first vote** needs a majority without a vote.  A store may have forgotten one: so a register that has known a vote
never takes that for the beginning, and no register does if some stores are locked and some are empty.  When a majority
has forgotten, only all stores together can begin again, from the newest vote that any of them still has.

**An empty register** is reported only when two looks in a row have found a majority without a vote, and only then do
all stores begin again.  The answers to one look come at different moments: a store that had forgotten may have been
included again before another forgets, and a client that was stopped may read answers that are long out of date.

**Late answers** count: on a network that loses packets, an answer often takes a second.  But if a store that is not in
the try answers meanwhile, the try is given up after 0.25 s, and the next one after twice as long: the store that it
waits for may have just gone.  So a write that was given up may hold, or be adopted by another client.

**Two clients** that write at the same time could each lock their nearest store first, and so end each other's tries.  A
client that sees another's unfinished try waits once, as long as its own last step took, before it disturbs that try.

**Guaranteed.**  Unless a majority of the stores has forgotten and was not included again, no write that held is lost,
whatever is frozen, cut off, late, repeated or lost.  A minority may be away.

**Not guaranteed.**  An empty store cannot tell whether it has forgotten.  If one forgets during the milliseconds of the
first vote while another does not answer, two registers may begin; so a first vote waits 0.25 s for all stores.  When a
majority has forgotten, an older value may come back; terms, which only rise, correct that.

**Not chosen.**  A majority read and write of counters (Attiya, Bar-Noy, Dolev) has no compare-and-set.  Disk Paxos
needs a block for each agent in each store, and agents come and go.  Without the snapshot, the promise of a store that
then forgot would count together with later ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import assert_never
from zlib import crc32

from aelastic.base.machine import Machine, Trace
from aelastic.rdzv.stores import register_events as ev
from aelastic.rdzv.stores.register_attempt import Attempt, Basis
from aelastic.rdzv.stores.register_cells import Ballot

# Once a majority has answered, the others get as long as it took, within these limits, or are left out.
PATIENCE_MIN_S, PATIENCE_MAX_S = 0.005, 0.05
# A first vote waits for stores that may know another vote.
FIRST_PATIENCE_S = 0.25
# The pause after another try interfered.
PAUSE_MIN_S, PAUSE_MAX_S = 0.004, 0.25
# A majority answers in milliseconds or, over new connections, in tenths of a second.
LIMIT_S = 2.0
# After this long without a majority, stores outside the try are read: if one answers, another try has a better chance.
# The time doubles with each further try, because stores on slow lines must be able to answer as well.
STEP_S = 0.25
CAME_BETWEEN = "another agent wrote at the same time"


class Phase(StrEnum):
    IDLE = auto()  # no operation
    LOOKING = auto()  # the cells are read
    LOCKING = auto()  # the cells that were seen get our promise
    WRITING = auto()  # the locked cells get our vote
    PAUSING = auto()  # a try has failed; the next is due soon


@dataclass(slots=True)
class Register(Machine[ev.Event, ev.Action]):
    """The register as one client sees it; one operation at a time.

    Args:
        size: the number of stores.
        name: the client's name, which no other client has.
        limit_s: the limit of one operation.
    """

    size: int
    name: str
    limit_s: float = LIMIT_S

    phase: Phase = Phase.IDLE
    deadline: float | None = None
    is_known: bool = False  # a vote was seen or written, at any time
    highest: int = 0  # the highest number of a ballot that was seen
    _trace: Trace = field(default_factory=Trace)
    _asked: ev.Requested = field(default_factory=ev.Requested)
    _until: float = 0.0  # the limit of the operation
    _step: int = 0  # counts the steps of all tries: answers to an earlier one are void
    _failed: int = 0  # failed tries of this operation
    _late: int = 0  # how many of those waited in vain for a majority
    _waited_for: Ballot | None = None  # the last try of another agent that was given time to end
    _try: Attempt = field(init=False)  # the last try

    def __post_init__(self) -> None:
        self._try = Attempt(self.size)

    @property
    def majority(self) -> int:
        return self.size // 2 + 1

    def _dispatch(self, event: ev.Event, now: float) -> list[ev.Action]:  # noqa: C901  one case for each event
        match event:
            case ev.Requested() if self.phase is Phase.IDLE:  # the first try
                self._asked, self._until, self._failed, self._late = event, now + self.limit_s, 0, 0
                return self._look(now)
            case ev.Requested():
                raise self._impossible(event)
            case ev.Dropped() if self.phase is Phase.IDLE:
                return []  # the answer was on its way
            case ev.Dropped():  # requests that are on their way may still take effect
                self.phase, self.deadline = Phase.IDLE, None
                return []
            case ev.Looked():
                return self._on_looked(event, now)
            case ev.Written():
                return self._on_written(event, now)
            case ev.Unanswered(step, store) if step != self._step or self._try.is_settled(store):
                return []  # of an earlier step, or a repetition
            case ev.Unanswered() if self.phase in {Phase.IDLE, Phase.PAUSING}:
                return []  # too late for its try
            case ev.Unanswered(_, store, reason):  # the try continues without that store
                self._try.leave_out(store, reason)
                return self._go_on(now)
            case ev.DeadlinePassed():
                return self._on_deadline_passed(now)
            case _:
                assert_never(event)

    def _on_looked(self, event: ev.Looked, now: float) -> list[ev.Action]:
        if event.cell is not None:
            self.highest = max(self.highest, event.cell.promised.number)
            self.is_known |= event.cell.vote is not None
        attempt, store = self._try, event.store
        if self.phase is Phase.LOOKING and event.step == self._step:
            attempt.missing.pop(store, None)
            attempt.seen.setdefault(store, event.cell)
            return self._go_on(now)  # which may have to wait for more
        if self.phase in {Phase.LOCKING, Phase.WRITING} and store not in attempt.seen:
            attempt.back.add(store)
            return self._go_on(now)  # which may have to wait for more
        return []  # too late for its try: the cells that were seen are being locked

    def _on_written(self, event: ev.Written, now: float) -> list[ev.Action]:
        attempt, store = self._try, event.store
        if self.phase not in {Phase.LOCKING, Phase.WRITING}:
            return []  # too late for its try
        if event.step != self._step or attempt.is_settled(store):
            return []  # of an earlier step, or a repetition
        if not event.is_done:
            attempt.leave_out(store, CAME_BETWEEN)
        elif self.phase is Phase.LOCKING:
            attempt.locked[store] = attempt.lock_of(store)
        else:
            attempt.written.add(store)
        return self._go_on(now)  # which may have to wait for more

    def _on_deadline_passed(self, now: float) -> list[ev.Action]:
        if self.phase is Phase.IDLE or self.deadline is None or now < self.deadline:
            return []  # disarmed or moved while the event was on its way
        if now >= self._until:
            return self._give_up()
        if self.phase is Phase.PAUSING:
            return self._look(now)
        return self._go_on(now)  # a majority continues without the others; without one, another try may get it

    # The steps.

    def _go_on(self, now: float) -> list[ev.Action]:
        """Ends the step if possible, after an answer or when the time for more of them is over."""
        attempt = self._try
        match self.phase:
            case Phase.LOOKING:
                basis = attempt.find_basis(self.name, is_known=self.is_known)
                if basis is not None:
                    is_first = basis.is_first and not attempt.empty_before
                    return self._when_seen(basis, now) if self._is_patient(now, is_first=is_first) else []
                if not self.is_known and attempt.may_have_begun(self.name):  # the first vote may be on its way
                    return self._fail(now) if self._is_patient(now, is_first=True) else []
                return self._give_up() if attempt.are_all_settled else self._wait_for_majority(now)
            case Phase.LOCKING | Phase.WRITING if attempt.is_hopeless:
                return self._fail(now)
            case Phase.LOCKING | Phase.WRITING if not attempt.has_majority:
                return self._wait_for_majority(now)
            case Phase.LOCKING:
                return self._write(now) if self._is_patient(now) else []
            case Phase.WRITING:
                return self._finish(attempt.text)
            case Phase.IDLE | Phase.PAUSING:
                raise AssertionError("no step is under way")
            case _:
                assert_never(self.phase)

    @property
    def _step_s(self) -> float:
        return STEP_S * 2.0**self._late

    def _wait_for_majority(self, now: float) -> list[ev.Action]:
        """Waits for late answers, unless stores that were away are back: another try would include them."""
        attempt = self._try
        if attempt.back and now >= attempt.began + self._step_s:
            self._late += 1
            return self._fail(now)
        if now < attempt.asked_at + self._step_s:
            return self._wait(attempt.asked_at + self._step_s)
        attempt.asked_at = now
        self._wait(now + self._step_s)
        return [ev.Look(self._step, store) for store in attempt.missing if store not in attempt.seen]

    def _is_patient(self, now: float, *, is_first: bool = False) -> bool:
        """Returns whether the stores beyond a majority have had their time to answer."""
        attempt = self._try
        if attempt.patient_until is None:
            patience_s = min(max(now - attempt.began, PATIENCE_MIN_S), PATIENCE_MAX_S)
            attempt.patient_until = now + (FIRST_PATIENCE_S if is_first else patience_s)
        if attempt.are_all_settled or now >= attempt.patient_until:
            return True
        self._wait(attempt.patient_until)
        return False

    def _look(self, now: float, empty_before: frozenset[int] = frozenset()) -> list[ev.Action]:
        self.phase, self._step = Phase.LOOKING, self._step + 1
        self._try = Attempt(self.size, now, now, empty_before)
        self._wait(now + self._step_s)
        return [ev.Look(self._step, store) for store in range(self.size)]

    def _when_seen(self, basis: Basis, now: float) -> list[ev.Action]:
        attempt, asked = self._try, self._asked
        if basis.is_first and basis.vote is not None and not attempt.empty_before:
            return self._look(now, basis.voters)  # one of the answers may be old
        text = asked.new if asked.new is not None and basis.text == asked.expected else basis.text
        if text == basis.text:
            if attempt.holds(basis):
                return self._finish(text)
            if basis.vote is None:
                return self._look(now, basis.voters)
        other = attempt.unfinished(self.name)
        if other is not None and not basis.is_first and other != self._waited_for:
            self._waited_for = other
            return self._fail(now)  # gives the other try a moment to end before it is disturbed
        self.phase, self._step, self.highest = Phase.LOCKING, self._step + 1, self.highest + 1
        attempt.begin_step(now)
        attempt.basis, attempt.text, attempt.ballot = basis, text, Ballot(self.highest, self.name)
        self._wait(now + self._step_s)
        return [ev.Write(self._step, store, cell, attempt.lock_of(store)) for store, cell in attempt.seen.items()]

    def _write(self, now: float) -> list[ev.Action]:
        attempt = self._try
        self.phase, self._step = Phase.WRITING, self._step + 1
        attempt.begin_step(now)
        vote = attempt.vote = attempt.next_vote()
        self.is_known = True
        self._wait(now + self._step_s)
        return [ev.Write(self._step, store, cell, cell.replace(vote=vote)) for store, cell in attempt.locked.items()]

    def _finish(self, text: bytes) -> list[ev.Action]:
        self.phase, self.deadline = Phase.IDLE, None
        return [ev.Done(text)]

    def _give_up(self) -> list[ev.Action]:
        attempt = self._try
        self.phase, self.deadline = Phase.IDLE, None
        missing = {store: attempt.missing.get(store, "") for store in range(self.size) if store not in attempt.seen}
        empty = tuple(store for store, cell in attempt.seen.items() if cell is None)
        return [ev.NoMajority(missing, empty if self.is_known else ())]

    def _fail(self, now: float) -> list[ev.Action]:
        """Tries again after a pause, which differs between clients.

        Another client needs about as long for its next step as this one has just needed.
        """
        self._failed += 1
        share = crc32(f"{self.name} {self._step}".encode()) % 1000 / 1000
        needed_s = max(PAUSE_MIN_S * 2**self._failed, now - self._try.began)
        pause_s = min(needed_s, PAUSE_MAX_S) * (0.5 + share)
        self.phase = Phase.PAUSING
        return self._wait(now + pause_s)

    def _wait(self, until: float) -> list[ev.Action]:
        self.deadline = min(until, self._until)
        return []

    def validate(self) -> None:
        assert (self.phase is Phase.IDLE) == (self.deadline is None), "only an operation has a deadline"
        assert self._try.locked.keys() <= self._try.seen.keys(), "a locked cell was seen"
        assert self._try.written <= self._try.locked.keys(), "a written cell was locked"
