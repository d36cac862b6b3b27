"""Fixtures for tests with torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from kit.launching import Launcher
from kit.servers.frameworks import python_with_frameworks
from kit.warm.interpreters import Warm
from kit.workers.in_place_training import course, script, start


@pytest.fixture
def torch_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)
    return pytest.importorskip("torch.distributed.run")


@pytest.fixture
def python() -> str:
    """An interpreter with the frameworks, and with everything that this one has."""
    return python_with_frameworks()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, warm: Warm) -> Iterator[str]:
    """The last line of the training that recovers in place, in a run without faults."""
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"), warm)
    yield course(start(launcher, script("def on_batch(step): pass\n"))).end
    launcher.close()
