"""Recovery in place in frameworks that own the training loop: accelerate, Lightning, and transformers' `Trainer`."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from kit.effort import FRAMEWORK_KILLS
from kit.launching import Launcher, ran
from kit.servers.frameworks import INSTALL_TIMEOUT_S
from kit.workers.in_place_examples import (
    LIMIT_S,
    OF_FRAMEWORKS,
    RANKS,
    InPlaceExample,
    Kills,
    check_recovers,
    end_of,
    kill_often,
    note,
    start,
)
from torch.utils.data import Dataset

from aelastic.training import ResumableSampler

of_each_framework = pytest.mark.parametrize("example", OF_FRAMEWORKS, ids=lambda each: each.name)


@pytest.mark.all
@pytest.mark.timeout(INSTALL_TIMEOUT_S + 4 * LIMIT_S)
@of_each_framework
def test_after_a_kill_an_example_of_a_framework_ends_as_undisturbed_bit_by_bit(
    launch: Launcher, example: InPlaceExample, python: str
) -> None:
    check_recovers(launch, example, python)


LONG = {
    "accelerate": ("--steps", "2000", "--log-every", "1000"),
    "lightning": ("--epochs", "8"),
    "transformers": ("--steps", "200", "--log-every", "50"),
}


@pytest.mark.all
@pytest.mark.long
@pytest.mark.timeout(INSTALL_TIMEOUT_S + 20 * LIMIT_S)
@of_each_framework
def test_after_many_kills_an_example_of_a_framework_ends_as_undisturbed_bit_by_bit(
    launch: Launcher, example: InPlaceExample, python: str, record_property: Callable[[str, str], None]
) -> None:
    options = LONG[example.name]
    end = end_of(start(launch, "undisturbed", example, python, options=options), 2 * LIMIT_S)
    kills, job = Kills(), 0
    while kills.kills < FRAMEWORK_KILLS:
        job += 1
        killed = start(launch, f"killed-{job}", example, python, options=options, max_restarts=2 * FRAMEWORK_KILLS + 10)
        kill_often(killed, kills, FRAMEWORK_KILLS, seed=job)
        assert end_of(killed, 2 * LIMIT_S) == end, f"{kills}\n{killed.story}"
        note(killed, kills)
    record_property("kills", str(kills))
    assert not kills.problems and kills.replaced <= kills.kills + kills.at_end * (RANKS - 1), kills


def runs(python: str, script: str) -> None:
    done = ran(python, "-c", textwrap.dedent(script), timeout=LIMIT_S)
    assert done.returncode == 0, done.stderr


# Private names.


@pytest.mark.all
@pytest.mark.timeout(INSTALL_TIMEOUT_S + 2 * LIMIT_S)
def test_the_reset_of_accelerate_leaves_nothing_of_its_state(python: str) -> None:
    runs(
        python,
        """
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from aelastic.training.frameworks.accelerate import reset_accelerate

        Accelerator(cpu=True)
        states = AcceleratorState, GradientState, PartialState
        assert all(each._shared_state for each in states)
        reset_accelerate()
        assert not any(each._shared_state for each in states)
        """,
    )


@pytest.mark.all
@pytest.mark.timeout(INSTALL_TIMEOUT_S + 2 * LIMIT_S)
def test_the_names_of_the_trainer_of_transformers_are_those_that_it_calls(python: str) -> None:
    runs(
        python,
        """
        import inspect
        from transformers import Trainer, trainer
        from aelastic.training.frameworks import transformers as ours

        assert f"self.{ours._LOAD_WEIGHTS}(resume_from_checkpoint)" in inspect.getsource(Trainer.train)
        assert ours._STATE_FILE == trainer.TRAINER_STATE_NAME
        """,
    )


@pytest.mark.all
@pytest.mark.timeout(INSTALL_TIMEOUT_S + 2 * LIMIT_S)
def test_the_loops_of_lightning_have_what_the_callback_reads(python: str) -> None:
    runs(
        python,
        """
        import lightning
        from torch.utils.data import DataLoader
        from aelastic.training import ResumableSampler
        from aelastic.training.frameworks.lightning import InPlace

        loop = lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False).fit_loop
        batches = loop.epoch_loop.batch_progress
        assert (loop.total_batch_idx, batches.is_last_batch, batches.current.processed) == (-1, False, 0)
        loop.load_state_dict(loop.state_dict())
        loop.reset_restart_stage()

        InPlace(None, DataLoader(range(4), sampler=ResumableSampler(range(4), 1, 0)))
        try:
            InPlace(None, DataLoader(range(4)))
        except TypeError as error:
            assert "give it a ResumableSampler" in str(error), error
        else:
            raise AssertionError("a loader that would repeat its batches was accepted")
        """,
    )


RESUMED = """
import sys
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset
from aelastic import in_place
from aelastic.training import ResumableSampler
from aelastic.training.frameworks.lightning import InPlace


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.network = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))

    def training_step(self, batch, index):
        return self.network(batch[0]).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters())
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "interval": "step"}]


@in_place
def train(round, steps, folder):
    module = Module()
    data = TensorDataset(torch.arange(128.0).reshape(32, 4) / 128)
    loader = DataLoader(data, batch_size=4, sampler=ResumableSampler(data))
    saves = ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=DDPStrategy(init_sync=False, process_group_backend="gloo"),
        max_steps=steps,
        callbacks=[InPlace(round, loader, checkpoint=f"{folder}/last.ckpt"), saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    torch.distributed.destroy_process_group()
    return torch.cat([each.detach().flatten() for each in module.parameters()])


undisturbed = train(20, "whole")
for steps in (5, 8, 16, 20):  # an epoch has 8
    resumed = train(steps, "parts")
assert torch.equal(undisturbed, resumed), (undisturbed, resumed)
"""


@pytest.mark.all
@pytest.mark.timeout(INSTALL_TIMEOUT_S + 2 * LIMIT_S)
def test_lightning_resumes_from_a_checkpoint_where_no_rank_has_the_state(
    python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs(python, RESUMED)


class Numbers(Dataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_leaves_out_what_was_seen_in_its_next_pass_only(drop_last: bool) -> None:
    sampler = ResumableSampler(Numbers(11), 3, 1, seed=4, drop_last=drop_last)
    sampler.set_epoch(2)
    whole = list(sampler)
    sampler.skip(2)
    assert list(sampler) == whole[2:]
    assert list(sampler) == whole
    assert len(sampler) == len(whole)


def test_a_sampler_takes_rank_and_world_size_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert list(ResumableSampler(Numbers(12), shuffle=False)) == [2, 6, 10]
