"""Fixtures of this ring."""

from __future__ import annotations

import pytest
from kit.servers.browser import need_browser


@pytest.fixture
def _browser() -> None:
    need_browser()
