"""What a process keeps across rounds: when its state is whole, which step it belongs to, and what a rewind restores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from aelastic.training import Late, Value, rounds
from aelastic.training.kept import NO_STEP, Kept
from aelastic.training.link import Link, RoundOver


class Round:
    """A round that a test ends, and a count of the checks."""

    def __init__(self) -> None:
        self.is_over = False
        self.checks = 0

    def check(self) -> None:
        self.checks += 1
        if self.is_over:
            raise RoundOver


@contextmanager
def kept_of(
    *objects: Any, check: Callable[[], None] = lambda: None, hold_end: Callable[[], bool] = lambda: False
) -> Iterator[Kept]:
    """Holds the state of step 0."""
    kept = Kept(check, hold_end)
    try:
        kept.adopt(objects, 0)
        yield kept
    finally:
        kept.close()


def with_gradients() -> tuple[nn.Linear, torch.optim.SGD]:
    model = nn.Linear(2, 2)
    model(torch.ones(2)).sum().backward()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_process_that_has_committed_nothing_has_no_step_and_is_fresh() -> None:
    kept = Kept(lambda: None)
    kept.close()
    assert (kept.whole_step, kept.is_fresh) == (NO_STEP, True)


def test_the_state_is_torn_from_an_update_until_the_commit() -> None:
    model, optimizer = with_gradients()
    with kept_of(model, optimizer) as kept:
        assert (kept.whole_step, kept.is_fresh) == (0, False)
        optimizer.step()
        assert kept.whole_step == NO_STEP
        kept.commit(1)
        assert kept.whole_step == 1


def test_any_optimizer_begins_an_update_until_nothing_is_watched_any_more() -> None:
    _, optimizer = with_gradients()
    with kept_of(nn.Linear(2, 2)) as kept:
        optimizer.step()
        assert kept.whole_step == NO_STEP
        kept.commit(1)
    optimizer.step()
    assert kept.whole_step == 1


@pytest.mark.parametrize("is_positional", [True, False])
def test_an_update_begins_after_its_closure(*, is_positional: bool) -> None:
    _, optimizer = with_gradients()
    round_ = Round()
    with kept_of(optimizer, check=round_.check) as kept:

        def closure() -> float:
            assert kept.whole_step == 0 and round_.checks == 0
            return 3.0

        loss = optimizer.step(closure) if is_positional else optimizer.step(closure=closure)
        assert (loss, kept.whole_step, round_.checks) == (3.0, NO_STEP, 1)


def test_no_update_begins_if_the_round_ends_in_its_closure() -> None:
    model, optimizer = with_gradients()
    before = model.weight.clone()
    round_ = Round()
    with kept_of(optimizer, check=round_.check) as kept:

        def closure() -> float:
            round_.is_over = True
            return 3.0

        with pytest.raises(RoundOver):
            optimizer.step(closure)
        assert kept.whole_step == 0 and torch.equal(model.weight, before)


def test_no_update_begins_once_the_round_is_over() -> None:
    model, optimizer = with_gradients()
    before = model.weight.clone()
    round_ = Round()
    with kept_of(model, optimizer, check=round_.check) as kept:
        round_.is_over = True
        with pytest.raises(RoundOver):
            optimizer.step()
        assert kept.whole_step == 0 and torch.equal(model.weight, before)


def test_no_update_begins_if_the_round_ends_just_before() -> None:
    model, optimizer = with_gradients()
    before = model.weight.clone()
    round_ = Round()

    def hold_end() -> bool:
        round_.is_over = True
        return True

    with kept_of(model, optimizer, check=round_.check, hold_end=hold_end) as kept:
        with pytest.raises(RoundOver):
            optimizer.step()
        assert kept.whole_step == 0 and torch.equal(model.weight, before)


def test_the_end_of_a_round_waits_from_the_first_update_of_a_step_to_its_commit() -> None:
    _, optimizer = with_gradients()
    calls: list[str] = []

    def hold_end() -> bool:
        calls.append("held")
        return False

    kept = Kept(lambda: None, hold_end, lambda: calls.append("released"))
    optimizer.step()
    optimizer.step()
    kept.commit(1)
    kept.close()
    assert calls == ["held", "held", "released"]


def test_the_update_has_begun_when_the_hooks_of_an_optimizer_run() -> None:
    """The hooks may change parameters."""
    _, optimizer = with_gradients()
    seen = []
    with kept_of(optimizer) as kept:
        optimizer.register_step_pre_hook(lambda *_: seen.append(kept.whole_step))
        optimizer.register_step_post_hook(lambda *_: seen.append(kept.whole_step))
        optimizer.step()
    assert seen == [NO_STEP, NO_STEP]


# Steps without an update of an optimizer.


@pytest.mark.parametrize("objects, step", [((), 0), ((Value(3),), NO_STEP)], ids=["model", "a value, too"])
def test_a_step_without_an_update_is_lost_with_its_round_and_tears_what_is_not_a_model(
    objects: tuple[Any, ...], step: int
) -> None:
    model, optimizer = with_gradients()
    round_ = Round()
    with kept_of(model, optimizer, *objects, check=round_.check) as kept:
        kept.commit(1)
        assert kept.whole_step == 1
        kept.adopt((model, optimizer, *objects), 0)
        round_.is_over = True
        with pytest.raises(RoundOver):
            kept.commit(1)
        assert kept.whole_step == step


def test_parameters_that_changed_since_the_round_began_tear_the_state() -> None:
    model, optimizer = with_gradients()
    with kept_of(model, optimizer) as kept:
        kept.note_versions()
        assert kept.check_versions() and kept.whole_step == 0
        with torch.no_grad():
            model.weight.add_(1)
        assert not kept.check_versions() and kept.whole_step == NO_STEP
        assert kept.check_versions(), "reported once"


def test_an_update_by_other_means_is_whole_with_its_commit() -> None:
    model, optimizer = with_gradients()
    with kept_of(model, optimizer) as kept:
        kept.note_versions()
        with torch.no_grad():
            model.weight.add_(1)
        kept.commit(1)
        assert kept.check_versions() and kept.whole_step == 1


# Rewinds.


class Buffers(nn.Module):
    """One buffer of each kind that a copy must include."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.other = nn.BatchNorm1d(3), nn.BatchNorm1d(5)
        self.register_buffer("table", torch.arange(6.0).view(2, 3))
        self.register_buffer("wide", torch.ones(1, 7))
        self.register_buffer("narrow", torch.ones(4, dtype=torch.float16))
        self.register_buffer("mask", torch.zeros(70000))
        self.register_buffer("hidden", torch.ones(2), persistent=False)
        self.register_buffer("none", None)
        self.register_buffer("empty", torch.empty(0))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def change(model: nn.Module) -> None:
    """Like a forward pass: most raise the buffer's version, and batch normalization does not."""
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.data.add_(1)
        else:
            buffer.add_(1)


def assert_equal(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    now = values(model)
    assert now.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(now[name], value), name


@pytest.mark.parametrize("commits", [0, 1, 2, 3])
def test_buffers_return_to_their_values_at_the_last_commit(commits: int) -> None:
    model = Buffers()
    with kept_of(model) as kept:
        for step in range(1, commits + 1):
            change(model)
            kept.commit(step)
        committed = values(model)
        for _ in range(2):
            change(model)
            kept.rewind()
            assert_equal(model, committed)


def test_the_statistics_that_a_forward_pass_has_moved_return() -> None:
    norm = nn.BatchNorm1d(3)
    model = nn.Sequential(nn.Linear(3, 3), norm)
    with kept_of(model) as kept:
        for step in (1, 2):
            model(torch.randn(4, 3))
            kept.commit(step)
        committed = values(model)
        model(torch.randn(4, 3))
        assert norm.num_batches_tracked == 3
        kept.rewind()
        assert_equal(model, committed)


def test_a_buffer_that_is_another_tensor_is_kept_from_its_next_commit_on() -> None:
    model = Buffers()
    with kept_of(model) as kept:
        kept.commit(1)
        model.norm.running_mean = torch.full((3,), 5.0)
        model.none = torch.ones(3)
        del model.table
        kept.commit(2)
        change(model)
        kept.commit(3)
        committed = values(model)
        change(model)
        kept.rewind()
        assert_equal(model, committed)
        old = model.narrow
        model.narrow = torch.zeros(4, dtype=torch.float16)
        kept.rewind()
        assert model.narrow is old, "the lost step has replaced the tensor"


def test_a_buffer_may_be_moved_to_another_type() -> None:
    model = Buffers()
    with kept_of(model) as kept:
        kept.commit(1)
        model.double()
        change(model)
        kept.commit(2)
        committed = values(model)
        change(model)
        kept.rewind()
        assert_equal(model, committed)


def test_buffers_return_in_each_round() -> None:
    model = Buffers()
    with kept_of(model) as kept:
        kept.commit(1)
        change(model)
        kept.adopt((model,), 1)
        adopted = values(model)
        change(model)
        kept.rewind()
        assert_equal(model, adopted)


def test_modules_return_to_their_mode_at_the_commit() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(2, 2))
    model[0].eval()
    with kept_of(model) as kept:
        model.train()
        kept.rewind()
        assert [each.training for each in model] == [False, True]


def test_gradients_and_what_a_scaler_has_unscaled_are_cleared() -> None:
    model, optimizer = with_gradients()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    with kept_of(model, optimizer, scaler) as kept:
        kept.clear_gradients()
    assert model.weight.grad is None
    scaler.unscale_(optimizer)  # torch refuses a second call before the next update


def test_what_a_framework_makes_later_is_kept_once_it_is_attached() -> None:
    late, model = Late(), nn.BatchNorm1d(2)
    with kept_of(late) as kept:
        late.attach(model)
        kept.hold(kept.objects)
        kept.commit(1)
        model(torch.randn(3, 2))
        kept.rewind()
        assert model.num_batches_tracked == 0


def test_objects_are_others_if_one_is() -> None:
    model, optimizer = with_gradients()
    with kept_of(model, optimizer) as kept:
        assert not kept.holds_other_than((model, optimizer))
        assert kept.holds_other_than((nn.Linear(2, 2), optimizer))


def test_gradients_of_what_a_framework_has_made_are_cleared() -> None:
    late, (model, optimizer) = Late(), with_gradients()
    late.attach(optimizer)
    with kept_of(late) as kept:
        kept.clear_gradients()
    assert model.weight.grad is None


# In a round.


@pytest.fixture
def page_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps that the agent reads from this process's page."""
    steps: list[int] = []
    monkeypatch.setattr(rounds, "page", SimpleNamespace(commit=steps.append, renew=lambda: None))
    return steps


# An agent that begins a round as soon as this worker is ready.
AT_ONCE = SimpleNamespace(
    send=lambda *_, **__: None,
    wait_for_begin=lambda _: {"env": {}, "round": 2, "patience": -1},
    end_update=lambda: None,
    sockets=SimpleNamespace(begin=lambda: None),
)


def round_with(kept: Kept) -> rounds.RoundInPlace:
    return rounds.RoundInPlace(cast("Link", None), kept, [], None)


def test_a_step_is_committed_when_its_body_ends(page_steps: list[int]) -> None:
    model, optimizer = with_gradients()
    seen = []
    with kept_of(model, optimizer) as kept:
        for step in round_with(kept).steps(0, 3):
            seen.append((step, kept.whole_step))
            optimizer.step()
        assert kept.whole_step == 3
    assert (seen, page_steps) == ([(0, 0), (1, 1), (2, 2)], [1, 2, 3])


def test_a_model_may_be_wrapped_after_the_call_of_steps_and_before_the_first_step(page_steps: list[int]) -> None:
    model, optimizer = with_gradients()
    with kept_of(model, optimizer) as kept:
        steps = round_with(kept).steps(0, 1)
        nn.init.zeros_(model.weight)  # DDP copies the parameters of rank 0
        assert (next(steps), kept.check_versions(), page_steps) == (0, True, [])


def test_a_step_that_the_script_commits_before_its_evaluation_is_not_committed_after_it(page_steps: list[int]) -> None:
    model, optimizer = with_gradients()
    with kept_of(model, optimizer) as kept:
        round_ = round_with(kept)
        for step in round_.steps(0, 1):
            optimizer.step()
            round_.commit(step + 1)
            model.eval()
        kept.rewind()
        assert model.training and page_steps == [1]


def test_a_model_that_a_framework_makes_is_kept_from_its_attachment_on(page_steps: list[int]) -> None:
    late, model = Late(), nn.BatchNorm1d(2)
    with kept_of(late) as kept:
        round_ = round_with(kept)
        round_.attach(late, model)
        round_.commit(1)
        model(torch.randn(3, 2))
        kept.rewind()
        assert model.num_batches_tracked == 0 and page_steps == [1]


def test_parameters_that_change_before_share_tear_the_state(page_steps: list[int]) -> None:
    """As a wrapper does that copies another rank's."""
    job = rounds._Rounds(cast("Link", AT_ONCE), None)
    model, optimizer = with_gradients()
    try:
        job.kept.adopt((model, optimizer), 0)
        job._begin()
        assert job.kept.check_versions()
        nn.init.zeros_(model.weight)
        assert not job.kept.check_versions()
    finally:
        job.kept.close()
    assert page_steps == []


def test_a_round_begins_without_the_vote_of_the_one_before(page_steps: list[int]) -> None:
    def is_voting() -> bool:
        return job.kept.hold_vote is not None

    job = rounds._Rounds(cast("Link", AT_ONCE), None)
    job.kept.close()
    job.kept.hold_vote = job.kept.tear
    assert is_voting()
    job._begin()
    assert not is_voting() and page_steps == []
