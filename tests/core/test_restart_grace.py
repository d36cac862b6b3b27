"""Restart grace: samples of workers go in, the end of the wait comes out."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.effort import examples

from aelastic.agent.group.restart_grace import (
    COMPUTE_S,
    COUNTED_S,
    FIRST_LOOK_S,
    IDLE_S,
    INTERVAL_S,
    GiveUp,
    Look,
    Looked,
    Phase,
    RestartGrace,
    Sample,
)
from aelastic.base.machine import DeadlinePassed, check_invariants

check_invariants()


class Story:
    """The grace of some workers with samples set by the test; ranks begin at 4."""

    def __init__(self, workers: int = 1, fixed_s: float | None = None) -> None:
        self.now = 100.0
        self.grace = RestartGrace({rank: 4 + rank for rank in range(workers)}, self.now, fixed_s)
        self.samples = {rank: Sample(written=1000, cpu_s=7.0) for rank in range(workers)}

    def look(self, *, late_s: float = 0.0) -> list[Any]:
        """Lets the deadline pass, then takes a look with these samples."""
        assert self.grace.deadline is not None
        self.now = self.grace.deadline + late_s
        actions: list[Any] = self.grace.handle(DeadlinePassed(), self.now)
        return self.grace.handle(Looked(self.samples), self.now) if actions == [Look()] else actions

    def write(self, rank: int = 0, bytes_: int = 1) -> None:
        sample = self.samples[rank]
        self.samples[rank] = sample.replace(written=(sample.written or 0) + bytes_)

    def compute(self, rank: int = 0, cpu_s: float = 0.2) -> None:
        self.samples[rank] = self.samples[rank].replace(cpu_s=self.samples[rank].cpu_s + cpu_s)

    def wait(self, limit_s: float = 60.0) -> tuple[float, str]:
        """Looks until the grace is over; returns when that was, and why."""
        while self.now < 100.0 + limit_s:
            for action in self.look():
                return self.now - 100.0, action.reason
        return limit_s, ""


def test_a_worker_that_does_nothing_is_given_two_seconds() -> None:
    """Counted from the first look, as writes before it cannot be seen."""
    waited_s, reason = Story().wait()
    assert waited_s == pytest.approx(FIRST_LOOK_S + IDLE_S)
    assert reason == "rank 4 neither wrote nor used the CPU for 2 s after SIGTERM"


def test_a_worker_that_writes_is_never_given_up() -> None:
    story = Story()
    for _ in range(1000):
        story.write()
        assert story.look() == []


def test_its_time_begins_again_when_it_has_written() -> None:
    story = Story()
    while story.now < 110.0:
        story.write()
        assert story.look() == []
    written_at = story.now
    _, reason = story.wait()
    assert story.now == written_at + IDLE_S
    assert reason == "rank 4 neither wrote nor used the CPU for 2 s, 12 s after SIGTERM"


def test_a_worker_that_only_computes_is_given_five_seconds() -> None:
    story = Story()
    actions: list[Any] = []
    while not actions:
        story.compute()
        actions = story.look()
    assert story.now - 100.0 == pytest.approx(FIRST_LOOK_S + COMPUTE_S)
    assert actions == [GiveUp("rank 4 used the CPU but wrote nothing for 5 s after SIGTERM")]


def test_a_thread_that_wakes_up_now_and_then_does_not_compute() -> None:
    story = Story()
    actions: list[Any] = []
    while not actions:
        story.compute(cpu_s=0.005)
        actions = story.look()
    assert story.now - 100.0 == pytest.approx(FIRST_LOOK_S + IDLE_S)


@pytest.mark.parametrize("wait", ["waits_for_disk", "waits_for_cpu"])
def test_a_wait_for_a_disk_is_a_write_and_a_wait_for_a_cpu_does_not_count(wait: str) -> None:
    story = Story()
    story.samples[0] = story.samples[0].replace(**{wait: True})
    assert story.wait(30.0)[0] == 30.0


@pytest.mark.parametrize("share", [1.0, 0.5, 0.1])
def test_the_five_seconds_of_a_worker_that_computes_are_those_in_which_it_has_a_cpu(share: float) -> None:
    """On a busy machine it gets only a share of a CPU."""
    story = Story()
    story.samples[0] = story.samples[0].replace(waits_for_cpu=True)
    story.look()
    actions: list[Any] = []
    while not actions:
        story.compute(cpu_s=share * INTERVAL_S)
        actions = story.look()
    assert story.now - 100.0 == pytest.approx(FIRST_LOOK_S + COMPUTE_S / share, abs=INTERVAL_S)
    starved = {1.0: None, 0.5: 5, 0.1: 45}[share]
    besides = f", not counting {starved} s waiting for a CPU" if starved else " after SIGTERM"
    assert f" used the CPU but wrote nothing for 5 s{besides}" in actions[0].reason


def test_a_worker_that_pauses_and_then_waits_for_a_cpu_is_not_idle() -> None:
    """Like a worker that saves in pieces on a busy machine: 1.5 s of sleep, then 2 s with 1 % of a CPU."""
    story = Story()
    for _ in range(5):
        story.write()
        story.look()
        for waits, looks in (False, 6), (True, 8):
            story.samples[0] = story.samples[0].replace(waits_for_cpu=waits)
            for _ in range(looks):
                story.compute(cpu_s=0.0025 if waits else 0.0)
                assert story.look() == []
    story.samples[0] = story.samples[0].replace(waits_for_cpu=False)
    assert story.wait()[1].startswith("rank 4 neither wrote nor used the CPU for 2 s")


def test_a_worker_that_has_written_gets_its_time_of_computing_again_however_long_it_waited_for_a_cpu() -> None:
    story = Story()
    for _ in range(40):
        story.samples[0] = story.samples[0].replace(waits_for_cpu=True)
        story.look()
    story.write()
    story.samples[0] = story.samples[0].replace(waits_for_cpu=False)
    story.look()
    written_at, actions = story.now, list[Any]()
    while not actions:
        story.compute()
        actions = story.look()
    assert story.now - written_at == pytest.approx(COMPUTE_S)


def test_a_worker_that_does_nothing_may_wait_for_one_that_writes() -> None:
    story = Story(2)
    for _ in range(40):
        story.write(1)
        assert story.look() == []
    del story.samples[1]  # it has ended
    assert story.look() == [GiveUp("rank 4 neither wrote nor used the CPU for 2 s, 10 s after SIGTERM")]


def test_a_reason_names_each_worker_with_what_it_did() -> None:
    story = Story(12)
    actions: list[Any] = []
    while not actions:
        story.compute(2)
        actions = story.look()
    assert actions[0].reason == (
        "ranks 4, 5, 7, 8, 9, 10, 11, 12 and 3 more neither wrote nor used the CPU for 2 s; "
        "rank 6 used the CPU but wrote nothing for 5 s after SIGTERM"
    )


def test_workers_that_cannot_be_seen_are_not_judged_and_those_that_are_gone_are_not_waited_for() -> None:
    story = Story(2)
    story.samples[1] = Sample()
    assert story.wait(20.0) == (20.0, "")
    del story.samples[1]
    assert len(story.look()) == 1
    story = Story()
    story.samples = {}
    assert story.wait(20.0) == (20.0, "")


def test_time_in_which_the_agent_did_not_look_does_not_count() -> None:
    story = Story()
    story.look()
    assert story.look(late_s=3600.0) == []
    before = story.now
    assert "neither" in story.wait(4000.0)[1]
    assert story.now - before == pytest.approx(IDLE_S - COUNTED_S)


def test_a_fixed_grace_looks_at_nothing() -> None:
    story = Story(2, fixed_s=1.5)
    assert story.look() == [GiveUp("ranks 4, 5 not ended 1.5 s after SIGTERM")]
    assert (story.now, story.grace.phase) == (101.5, Phase.OVER)


def test_what_comes_early_late_or_twice_changes_nothing() -> None:
    story = Story()
    assert story.grace.handle(DeadlinePassed(), 100.0) == []
    assert story.grace.handle(Looked(story.samples), 100.0) == []
    story.wait()
    assert story.grace.handle(DeadlinePassed(), 200.0) == []
    assert story.grace.handle(Looked(story.samples), 200.0) == []


# For each look: how late it is, and what two workers did before it.
DEEDS = st.sampled_from(["nothing", "nothing", "writes", "computes", "waits"])


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.0, 0.1, 2.0, 30.0]), DEEDS, DEEDS), max_size=80))
def test_it_is_never_over_unless_looks_enough_in_a_row_showed_no_writing(looks: list[tuple[float, str, str]]) -> None:
    story, quiet = Story(2), [0, 0]
    for late_s, *deeds in looks:
        for rank, deed in enumerate(deeds):
            quiet[rank] = 0 if deed in {"writes", "waits"} else quiet[rank] + 1
            story.samples[rank] = story.samples[rank].replace(waits_for_disk=deed == "waits")
            if deed == "writes":
                story.write(rank)
            if deed == "computes":
                story.compute(rank)
        if story.look(late_s=late_s):
            assert min(quiet) >= IDLE_S / COUNTED_S
            return
