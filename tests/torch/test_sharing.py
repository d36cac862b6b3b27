"""Which state wins, and what ends the job: one real rank, and messages of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import distributed as dist
from torch import nn

from aelastic.training import rounds
from aelastic.training.kept import NO_STEP, Kept
from aelastic.training.link import Link, RoundOver
from aelastic.training.shared_state import sharing
from aelastic.training.shared_state.sharing import (
    DifferentCheckpointsError,
    DifferentStatesError,
    LostStateError,
    Shared,
    share,
)
from aelastic.training.shared_state.wire import Wire

Answer = Callable[[list[int]], list[list[int]]]


class Scripted(Wire):
    """This process is rank 0.

    Args:
        ranks: of the group.
        answers: the other ranks' numbers for each exchange, given this rank's; after that they repeat this rank's.
    """

    def __init__(self, ranks: int = 1, *answers: Answer) -> None:
        self.ranks = [*range(ranks)]
        self.device = torch.device("cpu")
        self.answers = [*answers]
        self.gathered = 0
        self.sent_to: list[int] = []

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        self.gathered += 1
        mine = [int(each) for each in numbers]
        others = self.answers.pop(0)(mine) if self.answers else [mine] * (len(self.ranks) - 1)
        return [mine, *others]

    def send(self, buffer: torch.Tensor, target: int) -> None:
        assert len(buffer)
        if target not in self.sent_to:
            self.sent_to.append(target)


class Second(Scripted):
    """This process is rank 1 of two, and the round ends when rank 0 sends something."""

    def __init__(self, *answers: Answer) -> None:
        super().__init__(2, *answers)

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        return super().gather(numbers)[::-1]

    def receive(self, buffer: torch.Tensor, source: int) -> None:
        assert source == 0 and len(buffer)
        raise RoundOver


def others_answer(*steps: int, groups: Sequence[int] = ()) -> Answer:
    """Claims of these steps, by ranks in these groups (by default, in this rank's)."""

    def answer(mine: list[int]) -> list[list[int]]:
        claims = [[step, *mine[1:]] for step in steps]
        for claim, group in zip(claims, groups, strict=False):
            claim[GROUP] = group
        return claims

    return answer


GROUP = [*sharing.Claim.__dataclass_fields__].index("group")


@pytest.fixture(autouse=True)
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 0)


@pytest.fixture
def kept() -> Iterator[Kept]:
    made = Kept(lambda: None)
    yield made
    made.close()


def at_step(kept: Kept, step: int) -> list[Any]:
    objects = [nn.Linear(2, 2)]
    kept.adopt(objects, step)
    return objects


# At the start of a job.


def test_a_job_begins_with_what_the_script_has_made(kept: Kept) -> None:
    assert share(kept, [nn.Linear(2, 2)], None, Scripted(), Scripted()) == Shared(0, -1, needs_votes=False)


def test_all_ranks_get_the_weights_of_the_lowest_if_they_have_made_others(kept: Kept) -> None:
    replicas = Scripted(3, lambda mine: [[mine[0] + 1]] * 2)
    assert share(kept, [nn.Linear(2, 2)], None, replicas, Scripted(3)) == Shared(0, -1, needs_votes=False)
    assert replicas.sent_to == [1, 2]


def test_a_checkpoint_is_loaded_if_no_rank_has_a_state(kept: Kept) -> None:
    assert share(kept, [nn.Linear(2, 2)], lambda: 7, Scripted(2), Scripted(2)) == Shared(7, -1, needs_votes=False)


def test_ranks_that_have_no_checkpoint_get_what_others_have_loaded(kept: Kept) -> None:
    replicas, everyone = Scripted(2), Scripted(2, others_answer(-1), others_answer(-1))
    assert share(kept, [nn.Linear(2, 2)], lambda: 7, replicas, everyone).step == 7
    assert replicas.sent_to == [1]


def test_each_rank_loads_the_checkpoint(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert share(kept, [nn.Linear(2, 2)], lambda: 7, Second(), Second()) == Shared(7, -1, needs_votes=False)


def test_ranks_that_have_loaded_different_steps_end_the_job(kept: Kept) -> None:
    everyone = Scripted(2, others_answer(-1), others_answer(5, groups=[1]))
    with pytest.raises(DifferentCheckpointsError, match=r"ranks have loaded checkpoints of different steps: \[5, 7\]"):
        share(kept, [nn.Linear(2, 2)], lambda: 7, Scripted(1), everyone)


def test_ranks_that_have_loaded_different_states_of_a_step_end_the_job(kept: Kept) -> None:
    replicas = Scripted(2, lambda mine: [[mine[0] + 1]])
    with pytest.raises(DifferentStatesError, match="should have equal states of step 7, but differ"):
        share(kept, [nn.Linear(2, 2)], lambda: 7, replicas, Scripted(2))
    assert replicas.sent_to == []


# After a loss.


def test_a_rank_without_the_state_gets_it_from_one_that_has_it(kept: Kept) -> None:
    objects = at_step(kept, 4)
    replicas = Scripted(3)
    assert share(kept, objects, None, replicas, Scripted(3, others_answer(-1, 4))) == Shared(4, 0, needs_votes=False)
    assert replicas.sent_to == [1]


def test_a_rank_that_has_received_half_of_a_state_has_none(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    objects = at_step(kept, 4)
    with pytest.raises(RoundOver):
        share(kept, objects, None, Second(), Second(others_answer(5)))
    assert (kept.whole_step, kept.is_fresh) == (NO_STEP, False)


def test_gradients_of_the_lost_step_are_gone_once_the_state_is_shared(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "_share", lambda *_: Shared(4, 0, needs_votes=False))
    monkeypatch.setattr(rounds, "page", SimpleNamespace(commit=lambda _: None))
    (model,) = objects = at_step(kept, 4)
    model(torch.ones(2)).sum().backward()
    link = SimpleNamespace(send=lambda *_, **__: None)
    assert rounds.RoundInPlace(cast("Link", link), kept, [], None).share(*objects) == 4
    assert model.weight.grad is None and kept.whole_step == 4


def test_the_newest_step_that_every_group_has_wins(kept: Kept) -> None:
    objects = at_step(kept, 4)
    everyone = Scripted(4, others_answer(5, 4, 4, groups=[0, 2, 2]))
    assert share(kept, objects, None, Scripted(2), everyone) == Shared(4, 0, needs_votes=True)


@pytest.mark.parametrize("load", [None, lambda: None, lambda: 0], ids=["no load", "no checkpoint", "step 0"])
def test_without_a_step_that_every_group_has_and_without_a_checkpoint_the_state_is_lost(
    kept: Kept, load: sharing.Load | None
) -> None:
    objects = at_step(kept, 4)
    everyone = Scripted(2, others_answer(5, groups=[1]), others_answer(-1, groups=[1]))
    with pytest.raises(LostStateError):
        share(kept, objects, load, Scripted(1), everyone)


def test_without_a_step_that_every_group_has_all_ranks_load_the_checkpoint(kept: Kept) -> None:
    objects = at_step(kept, 4)
    everyone = Scripted(2, others_answer(5, groups=[1]), others_answer(3, groups=[1]))
    assert share(kept, objects, lambda: 3, Scripted(1), everyone) == Shared(3, -1, needs_votes=False)


def test_a_torn_state_is_not_offered(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    objects = at_step(kept, 4)
    kept.note_versions()
    nn.init.zeros_(objects[0].weight)
    with pytest.raises(LostStateError):
        share(kept, objects, None, Scripted(1), Scripted(1))
    assert "parameters have changed since this round began" in capsys.readouterr().err


def test_states_that_should_be_equal_and_differ_end_the_job(kept: Kept) -> None:
    objects = at_step(kept, 4)
    replicas = Scripted(2, lambda mine: [[mine[0] + 1]])
    with pytest.raises(DifferentStatesError, match=r"ranks \[0, 1\] should have equal states of step 4, but differ"):
        share(kept, objects, None, replicas, Scripted(2))


def test_a_large_state_is_compared_in_the_first_rounds_only(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharing, "_COMPARED_ALWAYS", 0)
    objects = at_step(kept, 4)
    compared = []
    for _ in range(4):
        replicas = Scripted(2)
        share(kept, objects, None, replicas, Scripted(2))
        compared.append(replicas.gathered)
    assert compared == [1, 1, 0, 0]


def test_objects_of_other_classes_than_in_the_last_round_are_refused(kept: Kept) -> None:
    at_step(kept, 4)
    with pytest.raises(ValueError, match=r"the objects were \['Linear'\] in the last round, and are \['ReLU'\]"):
        share(kept, [nn.ReLU()], None, Scripted(1), Scripted(1))
