"""A block in which starting a process fails, for the rings that run without processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest

# Every way to start a process in CPython ends in one of these.
_WAYS = ((os, ("fork", "forkpty", "posix_spawn", "posix_spawnp", "system")), (subprocess, ("Popen", "_fork_exec")))


@contextmanager
def no_processes() -> Iterator[None]:
    """Fails a test that starts a process."""

    def refuse(*args: Any, **keywords: Any) -> NoReturn:
        pytest.fail(f"a test of this ring starts a process; its place is tests/process ({args!r:.100})")

    with pytest.MonkeyPatch.context() as patched:
        for module, names in _WAYS:
            for name in names:
                patched.setattr(module, name, refuse)
        yield
