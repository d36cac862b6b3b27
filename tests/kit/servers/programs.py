"""Programs that run beside a test's jobs, and how tests treat a missing one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

from aelastic.base.host.children import waited_for


def missing(message: str, kind: str) -> NoReturn:
    """Skips the test, unless `TEST_KIND=required` makes it fail."""
    if os.environ.get(f"TEST_{kind}") == "required":
        pytest.fail(message)
    pytest.skip(message)


@contextmanager
def running(*command: str, **popen: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a program for the length of the block."""
    with subprocess.Popen(command, **popen) as process:
        waited_for.add(process.pid)  # so that no agent in this process takes it for an orphan
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            waited_for.discard(process.pid)
