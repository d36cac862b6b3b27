"""The checksum that ranks compare after sharing the state."""

from __future__ import annotations

import pytest
import torch

from aelastic.training import Late
from aelastic.training.shared_state.fingerprint import fingerprint


def trained() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_ranks_with_equal_parameters_and_optimizers_have_equal_fingerprints() -> None:
    assert fingerprint(trained()) == fingerprint(trained())


@pytest.mark.parametrize("what", ["a parameter", "a moment", "a learning rate"])
def test_a_difference_shows(what: str) -> None:
    model, optimizer = trained()
    with torch.no_grad():
        match what:
            case "a parameter":
                model.bias[0] += 1e-6
            case "a moment":
                optimizer.state[model.bias]["exp_avg"][0] += 1e-6
            case _:
                optimizer.param_groups[0]["lr"] = 2e-3
    assert fingerprint((model, optimizer)) != fingerprint(trained())


def test_a_survivor_with_an_object_that_a_framework_has_made_equals_a_replacement_that_has_only_its_state() -> None:
    model, optimizer = trained()
    survivors, replacements = Late(), Late()
    survivors.attach(optimizer)
    replacements.load_state_dict(survivors.state_dict())
    assert fingerprint((model, survivors)) == fingerprint((model, replacements))
