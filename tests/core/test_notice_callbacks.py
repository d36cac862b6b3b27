"""Callbacks for other projects' training loops, run with stand-ins that make the same calls in the same order."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from aelastic import notice
from aelastic.training.notice import callbacks


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records what happens; a save is due at the third step."""
    calls: list[str] = []

    def due() -> bool:
        calls.append("asks")
        return calls.count("asks") == 3

    monkeypatch.setattr(callbacks, "due", due)
    monkeypatch.setattr(callbacks, "saved", lambda: calls.append("has saved"))
    return calls


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str, base: str) -> None:
    module = types.ModuleType(name)
    setattr(module, base, type(base, (), {}))
    monkeypatch.setitem(sys.modules, name, module)


def test_hugging_faces_trainer_saves_once_and_reports_it_then(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    stand_in(monkeypatch, "transformers", "TrainerCallback")
    callback, control = notice.trainer_callback(), SimpleNamespace(should_save=False)
    for _ in range(4):
        control.should_save = False
        assert callback.on_step_end(None, None, control) is control
        if control.should_save:
            calls.append("saves")
            assert callback.on_save(None, None, control) is control
    assert calls == ["asks", "asks", "asks", "saves", "has saved", "asks"]


def test_a_save_of_the_trainers_own_is_left_alone(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    stand_in(monkeypatch, "transformers", "TrainerCallback")
    callback, control = notice.trainer_callback(), SimpleNamespace(should_save=True)
    callback.on_step_end(None, None, control)
    callback.on_save(None, None, control)
    assert control.should_save and calls == ["asks"]


@pytest.mark.parametrize("name", ["lightning.pytorch", "pytorch_lightning"])
def test_lightning_saves_under_either_of_its_names(
    monkeypatch: pytest.MonkeyPatch, calls: list[str], name: str
) -> None:
    for other in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, other, None)  # not installed
    if name == "lightning.pytorch":
        monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    stand_in(monkeypatch, name, "Callback")
    save: Callable[[str], None] = lambda path: calls.append(f"saves {path}")  # noqa: E731
    callback, trainer = notice.lightning_callback("x.ckpt"), SimpleNamespace(save_checkpoint=save)
    for batch in range(4):
        callback.on_train_batch_end(trainer, None, None, batch, batch)
    assert calls == ["asks", "asks", "asks", "saves x.ckpt", "has saved", "asks"]
