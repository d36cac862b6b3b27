"""Timers of workers: stories as text (`stories/timers/`), dropped lines, and a reference model."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.stories.timers import CHILD, EPOCH_S, STRANGER, WORKERS, Playing, line

from aelastic.diagnose.hangs import timer_rules as t


def test_without_timers_nothing_is_armed() -> None:
    assert Playing().left_s is None


def next_scope(story: Playing) -> str:
    (expired,) = story.pass_deadline()
    assert isinstance(expired, t.Expired)
    return expired.scope


@pytest.mark.parametrize("signum", [0, -1])
def test_a_timer_without_a_signal_is_only_reported_and_not_without_a_limit(signum: int) -> None:
    story, actions = Playing(), list[t.Action]()
    for number in range(3 * t.REPORTED_MAX):
        story.handle(f"0 sets step{number} 1 {signum}")
        actions += story.pass_deadline()
    assert [action.signum for action in actions if isinstance(action, t.Expired)] == [None] * t.REPORTED_MAX
    story.handle("0 sets step 1")
    assert next_scope(story) == "step"


# Dropped lines.

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
def test_a_line_that_is_not_a_timer_is_dropped_and_complained_of_once(data: bytes) -> None:
    story = Playing()
    story.handle("0 sets step 5")
    (complaint,) = story.receive(data)
    assert isinstance(complaint, t.Complain) and complaint.kind is t.Kind.MALFORMED
    assert len(complaint.quote) <= t.QUOTE_CHARS and complaint.quote.isprintable()
    assert story.receive(data, b"nonsense\n") == []
    assert (story.left_s, len(story.core)) == (5, 1)
    story.handle("0 sets other 4")
    assert story.left_s == 4


@pytest.mark.parametrize("length", [t.LINE_BYTES_MAX + 1, 5 * t.LINE_BYTES_MAX])
@pytest.mark.parametrize("step", [1 << 20, 4096, 1000])
def test_a_line_that_is_too_long_is_dropped_and_the_next_one_is_read(length: int, step: int) -> None:
    story = Playing()
    data = b"x" * length + b"\n" + line(100, "step", story.wall + 5)
    (complaint,) = (action for at in range(0, len(data), step) for action in story.receive(data[at : at + step]))
    assert isinstance(complaint, t.Complain) and complaint.kind is t.Kind.OVERSIZED
    assert len(complaint.quote) <= t.QUOTE_CHARS
    assert story.left_s == 5


def test_the_longest_line_that_the_client_sends_is_read() -> None:
    story = Playing()
    short = line(100, "", story.wall + 5)
    longest = line(100, "s" * (t.LINE_BYTES_MAX - len(short) + 1), story.wall + 5)
    assert len(longest) == t.LINE_BYTES_MAX + 1  # including its newline
    assert (story.receive(longest), story.left_s) == ([], 5)


def test_a_line_that_never_ends_takes_no_memory() -> None:
    story = Playing()
    for _ in range(100):
        story.receive(b"x" * t.LINE_BYTES_MAX)
        assert len(story.core._rest) <= t.LINE_BYTES_MAX
    story.receive(b"x\n", line(100, "step", story.wall + 5))
    assert story.left_s == 5


def test_fields_and_versions_to_come_are_none_of_our_business() -> None:
    story = Playing()
    assert (story.receive(line(100, "step", story.wall + 5, version=2, why="because")), story.left_s) == ([], 5)


def test_at_once_there_is_a_limited_number_of_timers_and_those_that_run_continue() -> None:
    story = Playing()
    (complaint,) = story.receive(*(line(100, f"step {n}", story.wall + 5 + n) for n in range(t.TIMERS_MAX + 10)))
    assert isinstance(complaint, t.Complain) and complaint.kind is t.Kind.EXCESS
    assert len(story.core) == t.TIMERS_MAX
    story.receive(line(100, "step 0", story.wall + 3), line(100, "step 1", -1, 0))  # still at the limit
    story.handle("1 sets step 4")
    assert [next_scope(story), next_scope(story)] == ["step 0", "step"]


def test_processes_without_a_timer_are_forgotten_when_there_have_been_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(t, "OWNERS_MAX", 64)
    story = Playing()
    story.handle("child sets kept 5")
    story.handle("child belongs to 0")
    for pid in range(1000, 1000 + t.OWNERS_MAX + 10):
        story.receive(line(pid, "load", story.wall + 5))
        story.core.handle(t.Belongs(1, pid, 0), story.now)
        story.receive(line(pid, "load", -1, 0))
    assert len(story.core._owners) < t.OWNERS_MAX
    assert story.receive(line(1000, "load", story.wall + 3)) == [t.FindOwner(1, 1000)]
    story.handle("1 sets step 4")
    assert [next_scope(story), next_scope(story)] == ["step", "kept"]


def test_lines_that_clear_are_remembered_up_to_a_limit() -> None:
    story = Playing()
    for number in range(2 * t.CLEARS_MAX + 10):
        story.handle(f"0 sets step{number} 5")
        story.handle(f"0 clears step{number}")
        assert len(story.core._clears) <= t.CLEARS_MAX
    assert len(story.core) == 0
    for _ in range(3):
        story.handle("0 sets step2000 5")
        assert len(story.core) == 1
        story.handle("0 clears step2000")
        assert len(story.core) == 0


# A model: dictionaries, searched in full.

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
    """The expected behaviour, as simply as possible."""

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
    """The core next to its model; answers the core's questions and counts its complaints."""

    def __init__(self) -> None:
        self.core, self.model = t.Timers(), Model()
        self.now, self.generation = 1000.0, 0
        self.complaints: list[t.Kind] = []
        self.actions = 0
        self.start()

    def start(self) -> None:
        self.generation += 1
        self.model = Model()
        self.carry_out(self.core.handle(t.Started(self.generation, WORKERS), self.now))

    def carry_out(self, actions: list[t.Action]) -> set[tuple[int, str, int | None]]:
        expired = set()
        for action in actions:
            match action:
                case t.FindOwner(generation, pid):
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
            self.carry_out(self.core.handle(t.DataReceived(piece, self.now + EPOCH_S), self.now))

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
    story = Playing()
    for piece in pieces:
        story.receive(piece)
    story.receive(b"\n", line(100, "step", story.wall + 5))
    assert story.left_s == 5
