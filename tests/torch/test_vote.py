"""The vote before an update: whichever ranks die and when, the survivors have a step in common, with its whole state.

The ranks of these tests are objects in one process; the barrier is scripted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.effort import examples

from aelastic.training import Value, rounds
from aelastic.training.kept import NO_STEP, Kept
from aelastic.training.link import Link, RoundOver
from aelastic.training.shared_state.sharing import Claim, Shared, are_votes_needed, newest_common_step, take_own
from aelastic.training.vote import Vote

STEP = 2


def nothing() -> None:
    pass


def cut() -> None:
    raise RuntimeError("Connection closed by peer")


def over() -> None:
    raise RoundOver


class Rank:
    """A rank with the whole state of `STEP`: a parameter, a moment, a running mean and a value, all of that step."""

    def __init__(self, group: int = 0) -> None:
        self.group = group
        self.on_check: Callable[[], None] = nothing
        self.on_wait: Callable[[], None] = nothing
        self.objects = self.make()
        self.kept = Kept(self._check)
        self.kept.close()  # its hook would see the optimizers of all ranks
        self.vote = Vote(self.kept, self._wait)
        for step in range(STEP):
            self.forward(step)
            self.update(step)
        self.kept.adopt(self.objects, STEP)
        self.kept.hold_vote = self.vote.hold

    def _check(self) -> None:
        self.on_check()

    def _wait(self) -> None:
        self.on_wait()

    @staticmethod
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, Value]:
        torch.manual_seed(0)
        model = torch.nn.BatchNorm1d(2)
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5), Value({"steps": set()})

    def forward(self, step: int) -> None:
        model, optimizer, _ = self.objects
        optimizer.zero_grad()
        model(torch.tensor([[1.0, 2.0], [3.0, float(step)]])).square().sum().backward()

    def update(self, step: int) -> None:
        _, optimizer, value = self.objects
        optimizer.step()
        value.value["steps"].add(step)

    def begin_next_round(self) -> None:
        self.kept.hold_vote = None
        self.on_check = self.on_wait = nothing

    def make_step(self) -> None:
        """Makes a step, or raises if it is cut before the update or after the commit."""
        self.forward(STEP)
        self.kept.begin_update()
        self.update(STEP)
        self.kept.commit(STEP + 1)
        self.vote.raise_if_cut()

    @property
    def claim(self) -> Claim:
        return Claim(self.kept.whole_step, self.kept.older_step, self.group, self.kept.is_fresh, True, 0, 0)

    def has_state_of(self, step: int, objects: Sequence[Any] | None = None) -> bool:
        wanted = Rank.undisturbed(step)
        model, optimizer, value = self.objects if objects is None else objects
        same = [torch.equal(model.state_dict()[name], other) for name, other in wanted.objects[0].state_dict().items()]
        moments = zip(
            optimizer.state_dict()["state"].values(), wanted.objects[1].state_dict()["state"].values(), strict=True
        )
        same += [torch.equal(mine["momentum_buffer"], other["momentum_buffer"]) for mine, other in moments]
        return all(same) and value.value == wanted.objects[2].value

    @staticmethod
    @cache
    def undisturbed(step: int) -> Rank:
        rank = Rank()
        if step > STEP:
            rank.make_step()
        return rank


def test_a_rank_that_has_not_voted_keeps_its_step() -> None:
    rank = Rank()
    rank.on_check = over
    with pytest.raises(RoundOver):
        rank.make_step()
    assert rank.claim.steps == {STEP}


def test_a_rank_whose_vote_has_passed_completes_the_step_even_if_the_round_is_over() -> None:
    rank = Rank()
    rank.forward(STEP)
    rank.kept.begin_update()
    rank.on_check = over
    rank.update(STEP)
    rank.kept.begin_update()  # another optimizer's
    rank.kept.commit(STEP + 1)
    assert rank.claim.steps == {STEP + 1}


@pytest.mark.parametrize("step", [STEP, STEP + 1])
@pytest.mark.parametrize("is_new", [True, False], ids=["new objects", "the same objects"])
def test_a_rank_that_is_cut_in_the_vote_has_both_steps(step: int, *, is_new: bool) -> None:
    rank = Rank()
    rank.on_wait = cut
    with pytest.raises(RuntimeError, match="closed by peer"):
        rank.make_step()
    assert rank.claim.steps == {STEP, STEP + 1}
    assert rank.has_state_of(STEP + 1)
    rank.begin_next_round()
    objects = Rank.make() if is_new else rank.objects
    rank.kept.rewind()
    take_own(rank.kept, step, objects)
    assert rank.has_state_of(step, objects)


def test_without_memory_for_a_copy_a_rank_keeps_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError

    rank = Rank()
    rank.on_wait = cut
    monkeypatch.setattr(torch.Tensor, "clone", no_memory)
    with pytest.raises(RuntimeError, match="closed by peer"):
        rank.make_step()
    monkeypatch.undo()
    assert rank.claim.steps == {STEP}
    rank.kept.rewind()
    assert rank.has_state_of(STEP)


def test_a_copy_is_dropped_once_all_ranks_have_agreed_on_a_step() -> None:
    rank = Rank()
    rank.on_wait = cut
    with pytest.raises(RuntimeError):
        rank.make_step()
    rank.kept.adopt(rank.objects, STEP + 1)
    assert rank.claim.steps == {STEP + 1}


def test_a_step_that_a_scaler_skips_is_voted_before_the_scale_changes() -> None:
    rank = Rank()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    votes: list[float] = []
    kept = Kept(nothing)
    try:
        kept.adopt([*rank.objects, scaler], STEP)
        kept.hold_vote = lambda: votes.append(scaler.get_scale())
        scaler.scale(torch.tensor(1.0))  # a scaler creates its scale on first use
        for parameter in rank.objects[0].parameters():
            parameter.grad = torch.full_like(parameter, float("inf"))
        scaler.step(rank.objects[1])
        assert votes == []
        scaler.update()
        assert (votes, scaler.get_scale()) == ([8.0], 4.0)
        kept.commit(STEP + 1)
        for parameter in rank.objects[0].parameters():
            parameter.grad = torch.ones_like(parameter)
        scaler.step(rank.objects[1])
        scaler.update()
        assert votes == [8.0, 4.0], "one for each step"
    finally:
        kept.close()
    scaler.update(2.0)
    assert votes == [8.0, 4.0]


@pytest.mark.parametrize(
    "groups, blind, is_needed",
    [
        ([0, 1, 0, 1], set(), True),
        ([0, 1, 0, 1], {3}, False),
        ([0, 0, 0, 0], set(), False),
        ([0, 1, 2, 3], set(), False),
        ([0], set(), False),
    ],
    ids=["HSDP", "HSDP, one rank cannot recover in place", "DDP", "FSDP", "one rank"],
)
def test_ranks_vote_if_a_loss_could_leave_replica_groups_a_step_apart(
    groups: list[int], blind: set[int], *, is_needed: bool
) -> None:
    claims = [Claim(NO_STEP, NO_STEP, group, True, rank not in blind, 0, 0) for rank, group in enumerate(groups)]
    assert are_votes_needed(claims) == is_needed


def test_a_rank_that_does_not_see_its_updates_does_not_vote() -> None:
    kept = Kept(nothing)
    assert kept.is_watching
    kept.close()
    assert not kept.is_watching


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_round_votes_if_share_finds_that_it_has_to(monkeypatch: pytest.MonkeyPatch, *, is_needed: bool) -> None:
    monkeypatch.setattr(rounds, "_share", lambda *_: Shared(STEP, 0, needs_votes=is_needed))
    monkeypatch.setattr(rounds, "page", SimpleNamespace(commit=lambda _: None))
    monkeypatch.setattr(torch.distributed, "barrier", cut)
    rank = Rank()
    rank.begin_next_round()
    link = SimpleNamespace(send=lambda *_, **__: None)
    round_ = rounds.RoundInPlace(cast("Link", link), rank.kept, [], None)
    assert round_.share(*rank.objects) == STEP
    rank.forward(STEP)
    rank.kept.begin_update()
    rank.update(STEP)
    if is_needed:
        with pytest.raises(RuntimeError, match="closed by peer"):
            round_.commit(STEP + 1)
    else:
        round_.commit(STEP + 1)
    assert rank.claim.steps == ({STEP, STEP + 1} if is_needed else {STEP + 1})


def test_a_step_that_only_some_survivors_of_each_group_have_is_not_taken() -> None:
    """Ranks 0 and 1 were cut in the vote, and 2 and 3 have not voted.  If rank 0 is lost before it has sent its newer
    step to rank 2, ranks 1 and 3 must still have the older one."""
    claims = [Claim(STEP + 1, STEP, 0, False, True, 0, 0), Claim(STEP + 1, STEP, 1, False, True, 0, 0)]
    claims += [Claim(STEP, NO_STEP, 0, False, True, 0, 0), Claim(STEP, NO_STEP, 1, False, True, 0, 0)]
    assert newest_common_step(claims) == STEP


def test_without_a_step_that_all_survivors_have_the_newest_of_each_group_is_taken() -> None:
    claims = [Claim(STEP + 1, NO_STEP, 0, False, True, 0, 0), Claim(STEP, NO_STEP, 0, False, True, 0, 0)]
    assert newest_common_step(claims) == STEP + 1
    assert newest_common_step([*claims, Claim(NO_STEP, NO_STEP, 1, False, True, 0, 0)]) == NO_STEP


@dataclass
class Fault:
    """Where a fault hits the ranks of a mesh."""

    shape: tuple[int, int]  # replicas, shards
    voters: set[int]  # ranks that have their gradients, and vote
    cut: set[int]  # those cut in the vote, if all have voted; otherwise all voters are
    deaths: list[set[int]] = field(
        default_factory=list
    )  # in the round, and in each that follows until all have the state
    adopters: list[set[int]] = field(default_factory=list)  # ranks with the agreed step when the next one dies


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    shape = draw(st.sampled_from([(2, 2), (2, 3), (3, 2)]))
    ranks = range(shape[0] * shape[1])
    some = st.sets(st.sampled_from(ranks))
    voters = set(ranks) if draw(st.booleans()) else draw(some)
    fault = Fault(shape, voters, draw(some))
    alive = set(ranks)
    for _ in range(draw(st.integers(1, 3))):
        dead = draw(some) & alive
        for shard in range(shape[1]):  # one replica of each shard lives
            replicas = {rank for rank in alive if rank % shape[1] == shard}
            if replicas <= dead:
                dead -= {draw(st.sampled_from(sorted(replicas)))}
        alive -= dead
        fault.deaths.append(dead)
        fault.adopters.append(draw(some))
    return fault


@settings(max_examples=examples(200), deadline=None)
@given(faults())
def test_survivors_have_a_step_in_common_while_each_shard_has_a_living_replica(fault: Fault) -> None:
    replicas, shards = fault.shape
    ranks = {number: Rank(number % shards) for number in range(replicas * shards)}
    have_all_voted = fault.voters == ranks.keys()
    for number, rank in ranks.items():
        if number not in fault.voters:
            rank.on_check = over
        elif number in fault.cut or not have_all_voted:
            rank.on_wait = cut
        try:
            rank.make_step()
        except (RoundOver, RuntimeError):
            pass
    for dead, adopters in zip(fault.deaths, fault.adopters, strict=True):
        for number in dead:
            del ranks[number]
        replacements = [Claim(NO_STEP, NO_STEP, number % shards, True, True, 0, 0) for number in dead]
        step = newest_common_step([*(rank.claim for rank in ranks.values()), *replacements])
        assert step in {STEP, STEP + 1}
        assert all(step in rank.claim.steps for rank in ranks.values())
        for number in adopters & ranks.keys():
            rank = ranks[number]
            rank.begin_next_round()
            rank.kept.rewind()
            objects = Rank.make()
            take_own(rank.kept, step, objects)
            rank.kept.adopt(objects, step)
            assert rank.has_state_of(step, objects)
