"""Ends simulated worlds with their tests: tasks of running processes might otherwise be collected at any moment."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.simulated import world


@pytest.fixture(autouse=True)
def _worlds_end() -> Iterator[None]:
    yield
    world.close_all()
