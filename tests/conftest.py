"""Fixtures of the tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launcher


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """Starts jobs; none of them outlives its test."""
    launcher = Launcher(tmp_path)
    yield launcher
    launcher.close()
