"""Timers of workers: what comes through the FIFO in, what has expired out."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.hangs import timer_rules as t

KILL = int(signal.SIGKILL)
# The wall clock is so far ahead of the monotonic one.
EPOCH_S = 1_700_000_000.0
WORKERS = {100: 0, 101: 1}
CHILD, STRANGER = 500, 600


def line(pid: Any, scope: Any, expiration_time: Any, signum: Any = KILL, **more: Any) -> bytes:
    """As torch's client writes it."""
    request = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": expiration_time, "signal": signum}
    return json.dumps(request | more).encode() + b"\n"


class Story:
    """Timers of two workers, and the clocks they are told."""

    def __init__(self) -> None:
        self.timers = t.Timers()
        self.now = 50.0
        self.tell(t.Started(1, WORKERS))

    @property
    def wall(self) -> float:
        return self.now + EPOCH_S

    def tell(self, event: t.Event) -> list[t.Action]:
        return self.timers.handle(event, self.now)

    def hear(self, *lines: bytes) -> list[t.Action]:
        return self.tell(t.Heard(b"".join(lines), self.wall))

    def set(self, pid: int, scope: str, after_s: float, signum: int = KILL) -> list[t.Action]:
        return self.hear(line(pid, scope, self.wall + after_s, signum))

    def clear(self, pid: int, scope: str) -> list[t.Action]:
        return self.hear(line(pid, scope, -1, 0))

    def pass_deadline(self) -> list[t.Action]:
        assert self.timers.deadline is not None
        self.now = max(self.now, self.timers.deadline)
        return self.tell(t.DeadlinePassed())

    @property
    def left_s(self) -> float | None:
        return None if self.timers.deadline is None else round(self.timers.deadline - self.now, 3)


def scopes(actions: Iterable[t.Action]) -> list[str]:
    return [action.scope for action in actions if isinstance(action, t.Expired)]


# Set, clear, expire.


def test_without_timers_nothing_is_armed() -> None:
    assert Story().left_s is None


def test_a_timer_that_is_not_cleared_expires_and_says_whose_it_is() -> None:
    story = Story()
    assert story.set(101, "step", 60) == []
    assert story.left_s == 60
    (expired,) = story.pass_deadline()
    assert isinstance(expired, t.Expired)
    assert (expired.generation, expired.local_rank, expired.pid) == (1, 1, 101)
    assert (expired.scope, expired.signum) == ("step", KILL)
    assert expired.set_for_s == pytest.approx(60, abs=1e-3)
    assert expired.late_s == pytest.approx(0, abs=1e-3)
    assert story.left_s is None


def test_a_timer_that_is_cleared_never_expires() -> None:
    story = Story()
    story.set(100, "step", 60)
    assert story.clear(100, "step") == []
    assert (story.left_s, len(story.timers)) == (None, 0)


@pytest.mark.parametrize("after_s, waited_s, set_for_s", [(2, 5, 2), (-3, 0, 0)])
def test_a_timer_expires_once_and_tells_how_late_it_is_noticed(after_s: int, waited_s: int, set_for_s: int) -> None:
    story = Story()
    story.set(100, "step", after_s)
    assert story.left_s == after_s
    story.now += waited_s
    (expired,) = story.tell(t.DeadlinePassed())
    assert isinstance(expired, t.Expired)
    assert (round(expired.set_for_s, 3), round(expired.late_s, 3)) == (set_for_s, 3)
    story.now += 1000
    assert story.tell(t.DeadlinePassed()) == []


def test_of_nested_timers_the_inner_one_expires_and_the_outer_one_goes_on() -> None:
    story = Story()
    story.set(100, "epoch", 60)
    for _ in range(3):
        story.set(100, "step", 5)
        story.clear(100, "step")
    story.set(100, "step", 5)
    assert scopes(story.pass_deadline()) == ["step"]
    assert story.left_s == 55
    assert scopes(story.pass_deadline()) == ["epoch"]


def test_a_timer_that_is_set_again_has_the_new_time_and_signal() -> None:
    story = Story()
    story.set(100, "step", 5)
    story.set(100, "step", 60, signal.SIGTERM)
    assert story.left_s == 60
    (expired,) = story.pass_deadline()
    assert isinstance(expired, t.Expired)
    assert expired.signum == signal.SIGTERM


def test_the_same_scope_of_two_workers_is_two_timers() -> None:
    story = Story()
    story.set(100, "step", 5)
    story.set(101, "step", 6)
    story.clear(100, "step")
    (expired,) = story.pass_deadline()
    assert isinstance(expired, t.Expired)
    assert expired.local_rank == 1


def test_timers_that_expire_together_are_told_in_the_order_of_their_times() -> None:
    story = Story()
    story.set(100, "second", 6)
    story.set(101, "third", 7)
    story.set(100, "first", 5)
    story.now += 10
    assert scopes(story.tell(t.DeadlinePassed())) == ["first", "second", "third"]


def test_what_does_not_exist_can_be_cleared() -> None:
    story = Story()
    assert story.clear(100, "step") == []
    assert story.clear(STRANGER, "step") == []


def test_a_wall_clock_that_is_set_later_moves_no_timer() -> None:
    story = Story()
    story.set(100, "step", 60)
    story.tell(t.Heard(line(101, "other", story.wall + 86_400 + 5), story.wall + 86_400))
    assert story.left_s == 5
    assert scopes(story.pass_deadline()) == ["other"]
    assert story.left_s == 55


def test_a_timer_may_be_set_for_ever() -> None:
    story = Story()
    assert story.set(100, "step", math.inf) == []
    story.now += 1e9
    assert story.tell(t.DeadlinePassed()) == []


@pytest.mark.parametrize("signum", [0, -1])
def test_a_timer_without_a_signal_is_only_told_of_and_that_not_for_ever(signum: int) -> None:
    story = Story()
    told = 0
    for number in range(3 * t.TOLD_MAX):
        story.set(100, f"step {number}", 1, signum)
        for action in story.pass_deadline():
            assert isinstance(action, t.Expired)
            assert action.signum is None
            told += 1
    assert told == t.TOLD_MAX
    story.set(100, "step", 1, KILL)
    assert scopes(story.pass_deadline()) == ["step"]


# Workers come and go.


def test_a_new_generation_has_none_of_the_timers_of_the_last() -> None:
    story = Story()
    story.set(100, "step", 5)
    story.tell(t.Started(2, {200: 0, 201: 1}))
    assert story.left_s is None
    story.set(200, "step", 7)
    assert story.left_s == 7


def test_a_worker_that_has_ended_has_no_timers_and_its_children_have_none() -> None:
    story = Story()
    story.set(100, "step", 5)
    story.set(CHILD, "load", 6)
    story.tell(t.Belongs(1, CHILD, 0))
    story.set(101, "step", 7)
    story.tell(t.Ended(1, 0))
    assert (story.left_s, len(story.timers)) == (7, 1)


def test_the_end_of_an_old_worker_clears_nothing_of_the_new_one() -> None:
    story = Story()
    story.tell(t.Started(2, {200: 0, 201: 1}))
    story.set(200, "step", 5)
    story.tell(t.Ended(1, 0))
    story.tell(t.Started(1, WORKERS))
    assert story.left_s == 5


def test_whose_a_process_is_is_asked_once() -> None:
    story = Story()
    assert story.hear(line(CHILD, "a", story.wall + 5), line(CHILD, "b", story.wall + 6)) == [t.Ask(1, CHILD)]
    assert story.left_s is None
    assert story.tell(t.Belongs(1, CHILD, 1)) == []
    assert story.set(CHILD, "c", 7) == []
    assert [story.left_s, *scopes(story.pass_deadline())] == [5, "a"]
    (expired,) = story.pass_deadline()
    assert isinstance(expired, t.Expired)
    assert (expired.local_rank, expired.pid, expired.scope) == (1, CHILD, "b")


def test_a_timer_that_is_cleared_before_it_is_known_whose_it_is_never_runs() -> None:
    story = Story()
    story.hear(line(CHILD, "load", story.wall + 5), line(CHILD, "load", -1, 0))
    story.tell(t.Belongs(1, CHILD, 1))
    assert len(story.timers) == 0


def test_timers_of_others_are_dropped_and_complained_of_once() -> None:
    story = Story()
    assert story.set(STRANGER, "step", 5) == [t.Ask(1, STRANGER)]
    assert story.tell(t.Belongs(1, STRANGER, None)) == [t.Complain(t.Kind.FOREIGN, f"pid {STRANGER}")]
    assert story.set(STRANGER, "step", 5) == [t.Ask(1, STRANGER)]  # it may be a child of another process by now
    assert story.tell(t.Belongs(1, STRANGER, None)) == []
    assert len(story.timers) == 0


@pytest.mark.parametrize("local_rank", [None, 0])
def test_a_process_that_has_ended_cannot_hang_and_is_no_reason_to_complain(local_rank: int | None) -> None:
    story = Story()
    story.set(CHILD, "step", 5)
    assert story.tell(t.Belongs(1, CHILD, local_rank, is_gone=True)) == []
    assert len(story.timers) == 0


def test_an_answer_for_an_earlier_generation_is_not_for_this_one() -> None:
    story = Story()
    story.set(CHILD, "step", 5)
    story.tell(t.Started(2, {200: 0, 201: 1}))
    assert story.tell(t.Belongs(1, CHILD, 0)) == []
    assert len(story.timers) == 0
    assert story.set(CHILD, "step", 5) == [t.Ask(2, CHILD)]


def test_what_was_not_asked_changes_nothing() -> None:
    story = Story()
    assert story.tell(t.Belongs(1, STRANGER, None)) == []
    assert story.tell(t.Belongs(1, CHILD, 0)) == []
    assert story.set(CHILD, "step", 5) == [t.Ask(1, CHILD)]


# Lines that are dropped.

MALFORMED = {
    "nothing": b"\n",
    "no JSON": b"step\n",
    "no end": b'{"version": 1, "pid": 100\n',
    "two": line(100, "step", 1.0).rstrip() + line(100, "step", 1.0),
    "a list": b'[1, 100, "step", 1.0, 9]\n',
    "a number": b"100\n",
    "a string": b'"pid"\n',
    "null": b"null\n",
    "no pid": b'{"scope_id": "step", "expiration_time": 1.0, "signal": 9}\n',
    "no signal": b'{"pid": 100, "scope_id": "step", "expiration_time": 1.0}\n',
    "a pid that is text": line("100", "step", 1.0),
    "a pid that is true": line(True, "step", 1.0),
    "a pid that is a fraction": line(100.0, "step", 1.0),
    "pid 0": line(0, "step", 1.0),
    "a negative pid": line(-100, "step", 1.0),
    "a pid that cannot be": line(t.PID_MAX + 1, "step", 1.0),
    "a pid that takes a minute to read": b'{"pid": ' + b"1" * 4000 + b"}\n",
    "a scope that is a number": line(100, 7, 1.0),
    "no scope": line(100, None, 1.0),
    "a time that is text": line(100, "step", "soon"),
    "a time that is true": line(100, "step", True),
    "a time that is none": line(100, "step", math.nan),
    "a time that is too large": b'{"pid": 100, "scope_id": "s", "expiration_time": 1'
    + b"0" * 400
    + b', "signal": 9}\n',
    "a signal that is text": line(100, "step", 1.0, "SIGKILL"),
    "a signal that is none": line(100, "step", 1.0, None),
    "a signal that there is not": line(100, "step", 1.0, int(signal.NSIG)),
    "no text": b'{"pid": 100, "scope_id": "\xff", "expiration_time": 1.0, "signal": 9}\n',
    "a deep nest": b"[" * (t.LINE_BYTES_MAX - 1) + b"\n",
    "zeros": b"\0" * 100 + b"\n",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_a_line_that_is_no_timer_is_dropped_and_complained_of_once(data: bytes) -> None:
    story = Story()
    story.set(100, "step", 5)
    (complaint,) = story.hear(data)
    assert isinstance(complaint, t.Complain)
    assert complaint.kind is t.Kind.MALFORMED
    assert len(complaint.quote) <= t.QUOTE_CHARS
    assert complaint.quote.isprintable()
    assert story.hear(data, b"nonsense\n") == []
    assert (story.left_s, len(story.timers)) == (5, 1)
    story.set(100, "other", 4)
    assert story.left_s == 4


@pytest.mark.parametrize("length", [t.LINE_BYTES_MAX + 1, 5 * t.LINE_BYTES_MAX])
@pytest.mark.parametrize("step", [1 << 20, 4096, 1000])
def test_a_line_that_is_too_long_is_dropped_and_the_next_one_is_read(length: int, step: int) -> None:
    story = Story()
    data = b"x" * length + b"\n" + line(100, "step", story.wall + 5)
    actions = [action for at in range(0, len(data), step) for action in story.hear(data[at : at + step])]
    (complaint,) = actions
    assert isinstance(complaint, t.Complain)
    assert complaint.kind is t.Kind.OVERSIZED
    assert len(complaint.quote) <= t.QUOTE_CHARS
    assert story.left_s == 5


def test_the_longest_line_that_the_client_sends_is_read() -> None:
    story = Story()
    short = line(100, "", story.wall + 5)
    longest = line(100, "s" * (t.LINE_BYTES_MAX - len(short) + 1), story.wall + 5)
    assert len(longest) == t.LINE_BYTES_MAX + 1  # with its newline
    assert story.hear(longest) == []
    assert story.left_s == 5


def test_a_line_that_never_ends_takes_no_memory() -> None:
    story = Story()
    story.hear(b"x" * t.LINE_BYTES_MAX)
    for _ in range(100):
        story.hear(b"x" * t.LINE_BYTES_MAX)
        assert len(story.timers._rest) <= t.LINE_BYTES_MAX
    story.hear(b"x\n", line(100, "step", story.wall + 5))
    assert story.left_s == 5


def test_fields_and_versions_to_come_are_none_of_our_business() -> None:
    story = Story()
    assert story.hear(line(100, "step", story.wall + 5, version=2, why="because")) == []
    assert story.left_s == 5


def test_at_once_there_is_a_limited_number_of_timers_and_those_that_run_go_on() -> None:
    story = Story()
    actions = story.hear(*(line(100, f"step {n}", story.wall + 5 + n) for n in range(t.TIMERS_MAX + 10)))
    (complaint,) = actions
    assert isinstance(complaint, t.Complain)
    assert complaint.kind is t.Kind.EXCESS
    assert len(story.timers) == t.TIMERS_MAX
    story.set(100, "step 0", 3)  # not one more
    story.clear(100, "step 1")
    story.set(101, "step", 4)
    assert [*scopes(story.pass_deadline()), *scopes(story.pass_deadline())] == ["step 0", "step"]


def test_processes_without_a_timer_are_forgotten_when_there_have_been_many() -> None:
    story = Story()
    story.set(CHILD, "kept", 5)
    story.tell(t.Belongs(1, CHILD, 0))
    for pid in range(1000, 1000 + t.OWNERS_MAX + 10):
        story.set(pid, "load", 5)
        story.tell(t.Belongs(1, pid, 0))
        story.clear(pid, "load")
    assert len(story.timers._owners) < t.OWNERS_MAX
    assert story.set(1000, "load", 3) == [t.Ask(1, 1000)]
    story.set(101, "step", 4)
    assert scopes(story.pass_deadline()) == ["step"]
    assert scopes(story.pass_deadline()) == ["kept"]


def test_lines_that_clear_are_remembered_up_to_a_limit() -> None:
    story = Story()
    for number in range(2 * t.CLEARS_MAX + 10):
        story.set(100, f"step {number}", 5)
        story.clear(100, f"step {number}")
        assert len(story.timers._clears) <= t.CLEARS_MAX
    assert len(story.timers) == 0
    for _ in range(3):
        story.set(100, "step 2000", 5)
        assert len(story.timers) == 1
        story.clear(100, "step 2000")
        assert len(story.timers) == 0


# A model: dictionaries, looked through from end to end.

PIDS = [100, 101, CHILD, STRANGER]
OWNER = {100: 0, 101: 1, CHILD: 1}
a_line = st.one_of(
    st.tuples(
        st.just("set"), st.sampled_from(PIDS), st.sampled_from("ab"), st.integers(-2, 9), st.sampled_from([0, 9])
    ),
    st.tuples(st.just("clear"), st.sampled_from(PIDS), st.sampled_from("ab"), st.just(0), st.just(0)),
    st.tuples(
        st.just("noise"), st.just(0), st.sampled_from(["", "{}", "x" * 5000, "\0", "[[[["]), st.just(0), st.just(0)
    ),
)
a_step = st.one_of(
    st.tuples(st.just("lines"), st.lists(a_line, max_size=6), st.lists(st.integers(0, 400), max_size=4)),
    st.tuples(st.just("wait"), st.integers(0, 5), st.none()),
    st.tuples(st.just("ended"), st.sampled_from([0, 1]), st.none()),
    st.tuples(st.just("started"), st.none(), st.none()),
)


class Model:
    """What should be so, in the plainest words."""

    def __init__(self) -> None:
        self.timers: dict[tuple[int, str], tuple[float, int]] = {}
        self.gone: set[int] = set()  # local ranks that have ended

    def line(self, verb: str, pid: int, scope: str, after_s: float, signum: int, *, now: float) -> None:
        if verb == "clear":
            self.timers.pop((pid, scope), None)
        elif verb == "set" and pid in OWNER and OWNER[pid] not in self.gone:
            self.timers[pid, scope] = (now + after_s, signum)

    def expire(self, now: float) -> set[tuple[int, str, int | None]]:
        over = {key: signum for key, (at, signum) in self.timers.items() if at <= now}
        for key in over:
            del self.timers[key]
        return {(*key, signum or None) for key, signum in over.items()}


def bytes_of(verb: str, pid: int, scope: str, after_s: float, signum: int, *, wall: float) -> bytes:
    match verb:
        case "set":
            return line(pid, scope, wall + after_s, signum)
        case "clear":
            return line(pid, scope, -1, 0)
        case _:
            return scope.encode() + b"\n"


class Checked:
    """The core beside its model; what it asks is answered, what it complains of is counted."""

    def __init__(self) -> None:
        self.core, self.model = t.Timers(), Model()
        self.now, self.generation = 1000.0, 0
        self.complaints: list[t.Kind] = []
        self.told = 0
        self.start()

    def start(self) -> None:
        self.generation += 1
        self.model = Model()
        self.carry_out(self.core.handle(t.Started(self.generation, WORKERS), self.now))

    def carry_out(self, actions: list[t.Action]) -> set[tuple[int, str, int | None]]:
        expired = set()
        for action in actions:
            match action:
                case t.Ask(generation, pid):
                    assert generation == self.generation
                    assert pid not in WORKERS or WORKERS[pid] in self.model.gone
                    rank = OWNER.get(pid)
                    is_gone = rank in self.model.gone
                    answer = t.Belongs(generation, pid, rank, is_gone)
                    assert not self.carry_out(self.core.handle(answer, self.now))
                case t.Complain(kind):
                    self.complaints.append(kind)
                case t.Expired(generation, local_rank, pid, scope, _, late_s, signum):
                    assert generation == self.generation
                    assert OWNER[pid] == local_rank
                    assert late_s >= 0
                    expired.add((pid, scope, signum))
        return expired

    def lines(self, lines: list[Any], cuts: list[int]) -> None:
        data = b""
        for each in lines:
            self.model.line(*each, now=self.now)
            data += bytes_of(*each, wall=self.now + EPOCH_S)
        pieces = []
        for cut in cuts:
            pieces.append(data[:cut])
            data = data[cut:]
        for piece in [*pieces, data]:
            self.carry_out(self.core.handle(t.Heard(piece, self.now + EPOCH_S), self.now))

    def wait(self, seconds: int) -> None:
        self.now += seconds + 0.5  # times are whole seconds, and wall times are rounded
        expired = self.carry_out(self.core.handle(t.DeadlinePassed(), self.now))
        due = self.model.expire(self.now)
        assert {each for each in expired if each[2]} == {each for each in due if each[2]}
        assert expired <= due
        self.now += 0.5

    def check(self) -> None:
        assert len(self.core) == len(self.model.timers)
        assert len(self.complaints) == len(set(self.complaints)), "complained twice of one kind"
        first = min((at for at, _ in self.model.timers.values()), default=None)
        assert (self.core.deadline is None) == (first is None)
        assert first is None or abs((self.core.deadline or 0) - first) < 0.01


@given(st.lists(a_step, max_size=25))
def test_whatever_is_written_and_however_it_is_cut_the_timers_are_those_of_the_model(steps: list[Any]) -> None:
    checked = Checked()
    for verb, first, second in steps:
        match verb:
            case "lines":
                checked.lines(first, second)
            case "wait":
                checked.wait(first)
            case "ended":
                checked.model.gone.add(first)
                checked.model.timers = {k: v for k, v in checked.model.timers.items() if OWNER[k[0]] != first}
                checked.carry_out(checked.core.handle(t.Ended(checked.generation, first), checked.now))
            case _:
                checked.start()
        checked.check()


@given(st.lists(st.binary(max_size=300), max_size=20))
def test_no_bytes_whatever_raise_or_keep_a_good_line_from_being_read(pieces: list[bytes]) -> None:
    story = Story()
    for piece in pieces:
        story.hear(piece)
    story.hear(b"\n", line(100, "step", story.wall + 5))
    assert story.left_s == 5
