"""Which workers hang, judging from samples: the core alone, on a test clock."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.diagnose.hangs import hang_rules as h
from aelastic.diagnose.hangs.options import HANG_SIGNALS, ExpectedOutput, HangRules
from aelastic.logs.expected_output import LINE_BYTES_MAX, ExpectedOutputMatcher, OutputSearch

TIMEOUT_S = 60.0
INTERVAL_S = TIMEOUT_S / h.LOOKS_PER_TIMEOUT
DEAD = h.Sample(output=7, cpu_s=1.0, io=9)


class Watched:
    """A core and its deadlines, on a clock of its own."""

    def __init__(self, *ranks: int, stuck_timeout_s: float | None = None, **rules: Any) -> None:
        given = {"hang_timeout_s": TIMEOUT_S, "hang_signals": HANG_SIGNALS, **rules}
        self.core = h.HangDetector(HangRules(**given), stuck_timeout_s)
        self.now = 1000.0
        self.looks = 0
        self.core.handle(h.Began(ranks or (0,)), self.now)

    def look(
        self,
        samples: Mapping[int, h.Sample] | h.Sample,
        late_s: float = 0.0,
        step_s: float | None = None,
        waiting: frozenset[int] = frozenset(),
    ) -> list[h.Verdict]:
        """Takes the next look when it is due; a single sample is for rank 0."""
        assert self.core.deadline is not None
        assert self.core.deadline >= self.now + h.INTERVAL_MIN_S
        self.now = self.core.deadline + late_s
        self.looks += 1
        return self.core.handle(
            h.Looked({0: samples} if isinstance(samples, h.Sample) else samples, self.now, step_s, waiting), self.now
        )

    def first(self, samples: Mapping[int, h.Sample] | h.Sample) -> tuple[float, list[h.Verdict]]:
        """Returns how long it takes until a look gives verdicts, with unchanging samples, and those verdicts."""
        begin = self.now
        while not (verdicts := self.look(samples)):
            assert self.now < begin + 10 * TIMEOUT_S, "no verdict"
        return self.now - begin, verdicts

    def assert_none(self, samples: Mapping[int, h.Sample] | h.Sample, for_s: float = 3 * TIMEOUT_S) -> None:
        until = self.now + for_s
        while self.now < until:
            assert self.look(samples) == []


@pytest.mark.parametrize("step_s, timeout_s", [(12.0, 60.0), (0.2, 30.0), (400.0, 900.0)])
def test_a_timeout_in_steps_is_a_multiple_of_the_median_within_limits(step_s: float, timeout_s: float) -> None:
    watched = Watched(hang_timeout_s=None, hang_timeout_steps=5.0)
    for _ in range(1000):  # before the first step
        assert watched.look(DEAD) == []
    assert watched.core.silence(watched.now) == (0.0, {})
    since = watched.now
    while not (verdicts := watched.look(DEAD, step_s=step_s)):
        assert watched.now < since + 2 * timeout_s
    reason = f"no output, CPU use or IO for {timeout_s:g} s (5 times the median step)"
    assert verdicts == [h.Verdict(0, "hang", reason, is_stopped=True, waited_s=timeout_s)]
    watched.core.handle(h.Began((0,)), watched.now)  # the next attempt has not begun its first step
    for _ in range(1000):
        assert watched.look(DEAD) == []


def test_a_worker_that_shows_nothing_hangs_after_the_timeout() -> None:
    took_s, verdicts = Watched().first(h.Sample(output=0, cpu_s=0.0, io=0))
    assert took_s == TIMEOUT_S + INTERVAL_S  # activity seen by the first look may have come just before it
    assert verdicts == [h.Verdict(0, "hang", "no output, CPU use or IO for 60 s", is_stopped=True, waited_s=60.0)]


def test_a_worker_that_waits_because_it_is_asked_to_hangs_if_it_shows_nothing_afterwards() -> None:
    watched = Watched(0, 1)
    for _ in range(30):
        for verdict in watched.look({0: DEAD, 1: DEAD}, waiting=frozenset({0})):
            assert (verdict.local_rank, watched.now) == (1, 1000.0 + TIMEOUT_S + INTERVAL_S), "the other rank is judged"
    took_s, verdicts = watched.first({0: DEAD, 1: DEAD})
    assert took_s == TIMEOUT_S and [verdict.local_rank for verdict in verdicts] == [0]


def test_a_worker_that_waits_because_it_is_asked_to_is_stuck_anyway() -> None:
    watched = Watched(hang_timeout_s=None, stuck_timeout_s=TIMEOUT_S)
    verdicts = [watched.look(DEAD.replace(sleep=5), waiting=frozenset({0})) for _ in range(12)]
    assert any(verdicts)


def test_the_silence_of_a_worker_lasts_from_its_last_sign_of_life() -> None:
    watched = Watched(0, 1)
    lives = [h.Sample(output=count, cpu_s=1.0, io=9) for count in range(2)]
    watched.look({0: lives[0], 1: DEAD})
    watched.look({0: lives[1], 1: DEAD})
    timeout_s, silent_s = watched.core.silence(watched.now + 1)
    assert (timeout_s, silent_s) == (TIMEOUT_S, {0: 1.0, 1: INTERVAL_S + 1})
    assert Watched(hang_timeout_s=None, stuck_timeout_s=9.0).core.silence(0.0) == (0.0, {})


def test_looks_are_ten_within_a_timeout_and_at_most_one_a_second() -> None:
    for timeout_s, looks in ((60.0, 11), (300.0, 11), (10.0, 11), (5.0, 6), (1.0, 2)):
        watched = Watched(hang_timeout_s=timeout_s)
        took_s, _ = watched.first(DEAD)
        assert watched.looks == looks
        assert took_s == timeout_s + max(1.0, timeout_s / 10)


@pytest.mark.parametrize(
    "changed",
    [{"output": 8}, {"io": 10}, {"cpu_s": 1.0 + h.CPU_FRACTION_MIN * INTERVAL_S}],
    ids=lambda c: next(iter(c)),
)
def test_any_sign_puts_it_off_for_the_whole_timeout(changed: dict[str, Any]) -> None:
    watched = Watched()
    watched.look(DEAD)
    for _ in range(5):
        assert watched.look(DEAD) == []
    alive = DEAD.replace(**changed)
    assert watched.look(alive) == []
    assert watched.first(alive)[0] == TIMEOUT_S


@pytest.mark.parametrize("sign, words", [("output", "output"), ("cpu", "CPU use"), ("io", "IO")])
def test_only_the_chosen_signs_count(sign: str, words: str) -> None:
    watched = Watched(hang_signals=(sign,))
    key = {"output": "output", "cpu": "cpu_s", "io": "io"}[sign]
    step = 0
    verdicts: list[h.Verdict] = []
    while not verdicts:
        step += 1
        busy: dict[str, Any] = {"output": step, "cpu_s": float(10 * step), "io": step}
        verdicts = watched.look(h.Sample(**busy).replace(**{key: 1}))
    assert [verdict.reason for verdict in verdicts] == [f"no {words} for 60 s"]


def test_two_signs_are_reported_in_words() -> None:
    _, (verdict,) = Watched(hang_signals=("output", "io")).first(DEAD)
    assert verdict.reason == "no output or IO for 60 s"


def test_less_than_a_hundredth_of_a_core_is_not_a_sign() -> None:
    for share, hangs in ((0.009, True), (0.011, False)):
        watched = Watched(hang_signals=("cpu",))
        verdicts: list[h.Verdict] = []
        for step in range(1, 30):
            verdicts += watched.look(h.Sample(cpu_s=share * INTERVAL_S * step))
        assert bool(verdicts) is hangs, share


def test_one_step_of_the_kernels_clock_is_not_a_sign_however_soon_we_look_again() -> None:
    watched = Watched(hang_timeout_s=1.0, hang_signals=("cpu",))
    verdicts = [verdict for step in range(8) for verdict in watched.look(h.Sample(cpu_s=0.01 * step))]
    assert verdicts


def test_what_cannot_be_seen_is_not_a_reason() -> None:
    Watched().assert_none(h.Sample())
    Watched(hang_signals=("io",)).assert_none(h.Sample(output=1, cpu_s=1.0))
    Watched().assert_none({})
    _, (verdict,) = Watched().first(h.Sample(output=1, cpu_s=1.0))
    assert verdict.reason == "no output or CPU use for 60 s"


def test_several_that_hang_are_reported_at_once_by_rank_and_those_that_work_are_not() -> None:
    watched = Watched(3, 1, 2, 0)
    verdicts: list[h.Verdict] = []
    step = 0
    while not verdicts:
        step += 1
        verdicts = watched.look({0: DEAD, 1: DEAD, 2: h.Sample(output=step, cpu_s=0.0, io=0), 3: DEAD})
    assert [verdict.local_rank for verdict in verdicts] == [0, 1, 3]


def test_a_hang_is_reported_once_and_again_only_after_life() -> None:
    watched = Watched(hang_action="report")
    _, (verdict,) = watched.first(DEAD)
    assert not verdict.is_stopped
    watched.assert_none(DEAD)
    alive = h.Sample(output=8, cpu_s=1.0, io=9)
    assert watched.look(alive) == []
    assert watched.first(alive)[0] == TIMEOUT_S


def test_no_worker_is_looked_at_that_has_ended_and_a_new_generation_begins_again() -> None:
    watched = Watched(0, 1)
    for _ in range(8):
        watched.look({0: DEAD, 1: DEAD})
    watched.core.handle(h.Ended(0), watched.now)
    watched.core.handle(h.Ended(0), watched.now)
    took_s, verdicts = watched.first({1: DEAD})
    assert [verdict.local_rank for verdict in verdicts] == [1]
    watched.core.handle(h.Ended(1), watched.now)
    assert watched.core.deadline is None
    watched.core.handle(h.Began((0, 1)), watched.now)
    assert watched.first({0: DEAD, 1: DEAD})[0] == TIMEOUT_S + INTERVAL_S > took_s


def test_no_worker_is_looked_at_where_no_rule_is_on() -> None:
    assert Watched(hang_timeout_s=None).core.deadline is None


def test_the_time_in_which_the_agent_was_suspended_does_not_count() -> None:
    watched = Watched()
    watched.look(DEAD)
    begin = watched.now
    assert watched.look(DEAD, late_s=3600.0) == []
    took_s, _ = watched.first(DEAD)
    assert watched.now - begin - 3600.0 == TIMEOUT_S
    assert took_s < TIMEOUT_S


def test_a_timer_that_is_a_moment_early_does_not_put_it_off() -> None:
    watched = Watched()
    watched.look(DEAD)
    for _ in range(h.LOOKS_PER_TIMEOUT - 1):
        assert watched.look(DEAD) == []
    assert watched.look(DEAD, late_s=-h.EARLY_S / 2)


# ExpectedOutputMatcher output.


def expecting(within_s: float = 30.0, **rules: Any) -> Watched:
    return Watched(hang_timeout_s=None, expect_output=ExpectedOutput(r"loss=\d", within_s), **rules)


def test_output_that_never_comes_is_missed_after_the_start() -> None:
    took_s, verdicts = expecting().first(h.Sample(matches=0))
    assert took_s == 30.0
    reason = r"no output that matches 'loss=\d' in its first 30 s"
    assert verdicts == [h.Verdict(0, "output", reason, is_stopped=True, waited_s=30.0)]


def test_output_that_came_and_comes_no_more_is_missed_after_the_last() -> None:
    watched = expecting()
    for count in range(20):
        assert watched.look(h.Sample(matches=count)) == []
    took_s, (verdict,) = watched.first(h.Sample(matches=19))
    assert took_s == 30.0
    assert verdict.reason == r"no output that matches 'loss=\d' for 30 s"


def test_a_worker_that_is_not_expected_to_write_or_not_searched_in_time_is_not_missed() -> None:
    expecting().assert_none(h.Sample())


def test_output_that_is_missed_is_only_reported_where_that_is_requested() -> None:
    _, (verdict,) = expecting(hang_action="report").first(h.Sample(matches=0))
    assert not verdict.is_stopped


def test_a_long_pattern_is_quoted_in_part() -> None:
    watched = Watched(hang_timeout_s=None, expect_output=ExpectedOutput("x" * 10_000, 5.0))
    _, (verdict,) = watched.first(h.Sample(matches=0))
    assert len(verdict.reason) < h.PATTERN_CHARS + 80


# Uninterruptible sleep.


def test_the_same_uninterruptible_sleep_is_stuck_whatever_else_may_only_be_reported() -> None:
    watched = Watched(hang_timeout_s=None, stuck_timeout_s=20.0, hang_action="report")
    took_s, verdicts = watched.first(h.Sample(sleep=4096))
    assert took_s == 22.0
    reason = "in uninterruptible sleep (state D), which no signal can end, for 20 s"
    assert verdicts == [h.Verdict(0, "stuck", reason, is_stopped=True, waited_s=20.0)]


def test_sleep_that_is_left_or_in_which_io_continues_is_not_stuck() -> None:
    watched = Watched(hang_timeout_s=None, stuck_timeout_s=20.0)
    for step in range(40):
        assert watched.look(h.Sample(sleep=step)) == []
    for step in range(40):
        assert watched.look(h.Sample(sleep=None if step % 5 == 0 else 1)) == []


def test_each_rule_keeps_its_own_time() -> None:
    watched = Watched(stuck_timeout_s=20.0, expect_output=ExpectedOutput("x", 40.0))
    verdicts: list[tuple[str, float]] = []
    begin = watched.now
    while len(verdicts) < 3:
        verdicts += [
            (v.by, watched.now - begin) for v in watched.look(h.Sample(output=0, cpu_s=0.0, io=0, matches=0, sleep=1))
        ]
    assert verdicts == [("stuck", 22.0), ("output", 40.0), ("hang", 62.0)]


# Any sequence of events.


@given(
    st.sampled_from([1.0, 3.0, 10.0, 45.0]),
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.sampled_from([0.0, 0.3, h.LATE_S / 2])), min_size=5, max_size=60
    ),
)
def test_no_verdict_is_early_and_none_is_late_by_more_than_the_looks_are_apart(
    timeout_s: float, course: list[tuple[bool, bool, float]]
) -> None:
    watched = Watched(0, 1, hang_timeout_s=timeout_s, hang_signals=("output",))
    interval_s = max(h.INTERVAL_MIN_S, timeout_s / h.LOOKS_PER_TIMEOUT)
    outputs = [0, 0]
    since = [watched.now, watched.now]  # when a look last showed activity
    reported = [False, False]
    watched.look({0: h.Sample(output=0), 1: h.Sample(output=0)})
    since = [watched.now, watched.now]
    for *lives, late_s in course:
        for rank, lived in enumerate(lives):
            outputs[rank] += bool(lived)
        verdicts = watched.look({rank: h.Sample(output=outputs[rank]) for rank in (0, 1)}, late_s=late_s)
        named = {verdict.local_rank for verdict in verdicts}
        for rank, lived in enumerate(lives):
            silent_s = watched.now - since[rank]
            if lived:
                assert rank not in named
                since[rank], reported[rank] = watched.now, False
            elif rank in named:
                assert silent_s >= timeout_s - h.EARLY_S
                assert not reported[rank], "told twice"
                reported[rank] = True
            else:
                assert reported[rank] or silent_s < timeout_s + interval_s + h.LATE_S


# The search.


def chunks_of(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(bounds)]


@given(
    st.lists(st.sampled_from(["loss=1", "step 2", "", "xloss=", "=1", "é loss=3 é"]), max_size=12),
    st.sampled_from(["\n", "\r", "\r\n"]),
    st.lists(st.integers(0, 200), max_size=12),
)
def test_a_match_is_found_however_the_output_comes(lines: list[str], ending: str, cuts: list[int]) -> None:
    matcher = ExpectedOutputMatcher(r"^.*loss=\d")
    search = OutputSearch([matcher])
    for chunk in chunks_of("".join(line + ending for line in lines).encode(), cuts):
        assert search.takes(chunk, 0, more=False) == len(chunk)
        assert search.feed(chunk) == b""
    assert bool(matcher.ask()) is any("loss=1" in line or "loss=3" in line for line in lines)
    assert search.end() == b"" and not search.is_open


@pytest.mark.parametrize(
    "pattern, course",
    [
        ("a", [b"a\na\na\n", 1, 1, b"b\n", 1, b"a\n", 2]),
        ("^tail", [b"tail\n", b"begins with a ", 1, b"tail\n", 1, b"tail\n", 2]),
        ("> $", [b"name> ", 1, 1, 1, b"x\nname> ", 2]),
    ],
    ids=["one match between two questions is enough", "a line's beginning was passed over", "a line is not complete"],
)
def test_each_question_starts_again(pattern: str, course: list[bytes | int]) -> None:
    search = ExpectedOutputMatcher(pattern)
    for each in course:
        if isinstance(each, bytes):
            search.feed(each)
        else:
            assert search.ask() == each


def test_when_no_caller_asks_any_more_nothing_is_searched() -> None:
    search = ExpectedOutputMatcher("a")
    search.feed(b"a\n")
    search.stop()
    search.feed(b"a\na\n")
    assert (search.ask(), search.ask()) == (1, 1)


def test_of_a_line_without_end_no_more_than_a_piece_is_kept() -> None:
    search = ExpectedOutputMatcher("needle")
    for _ in range(1000):
        search.feed(b"x" * 10_000)
        assert len(search._tail) <= LINE_BYTES_MAX
    assert search.ask() == 0
    search.feed(b"needle")
    assert search.ask() == 1
