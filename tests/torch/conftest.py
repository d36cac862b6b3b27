"""Fixtures of the tests beside torch."""

from __future__ import annotations

import os
from typing import Any

import pytest
from kit.servers.frameworks import python_with_frameworks


@pytest.fixture
def torch_run(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in list(os.environ):
        if name.startswith("PET_"):
            monkeypatch.delenv(name)
    return pytest.importorskip("torch.distributed.run")


@pytest.fixture
def python() -> str:
    """An interpreter that has the frameworks, and all that this one has."""
    return python_with_frameworks()
