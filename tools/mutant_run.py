"""What pytest does in a run of `mutants.py`: the chosen tests in their order, up to the first that fails.

Tests are timed by the CPU time of their process, which does not grow with what else the machine does.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


class MutantRun:
    """A plugin.

    Args:
        folder: the copy that is tested.
        plan: `report`, a file for what was seen; `tests`, the tests to run, each with the CPU seconds after which it
            hangs; without them all run, and are timed.
    """

    def __init__(self, folder: Path, plan: dict[str, Any]) -> None:
        self._folder, self._report = folder, Path(plan["report"])
        self._limits: dict[str, float] = plan.get("tests", {})
        self._seconds: dict[str, float] = {}
        self._failed = ""
        self._running = ""
        self._began_s = 0.0

    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        home = importlib.import_module("aelastic").__file__
        if home is None or not Path(home).is_relative_to(self._folder):
            pytest.exit(f"the copy in {self._folder} should be tested, and {home} was imported", returncode=3)
        # One failure is enough, whatever it looks like: it is not made smaller, and not kept for the next mutant.
        settings.register_profile("mutants", settings(database=None, phases=(Phase.explicit, Phase.generate)))
        settings.load_profile("mutants")
        signal.signal(signal.SIGVTALRM, self._on_hang)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None, None, None]:
        yield
        if self._limits:
            by_id = {item.nodeid: item for item in items}
            items[:] = [by_id[test] for test in self._limits if test in by_id]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._running, self._began_s = nodeid, time.process_time()
        if self._limits:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._limits[nodeid])

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._seconds[nodeid] = round(time.process_time() - self._began_s, 4)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failed:
            self._failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self._failed:
            self._failed = report.nodeid

    def pytest_sessionfinish(self) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        self._write()

    def _on_hang(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002  as handlers are called
        self._failed = self._running
        self._write()
        os._exit(1)

    def _write(self) -> None:
        self._report.write_text(json.dumps({"failed": self._failed, "seconds": self._seconds}))
