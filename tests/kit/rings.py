"""The rings: the content of each, and how long its tests may take.

A ring is a folder of `tests/`.  Rings without processes run beside the others, at low priority.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]
# The file to which pytest writes the durations of tests, for the program that started it (`tools/run_tests.py`).
DURATIONS = "TEST_DURATIONS"
# The share of the tests to run, such as `1/2`: the first of every two.
SHARE = "TEST_SHARE"


@dataclass(frozen=True)
class Ring:
    """One folder of tests.

    Args:
        name: the name of the folder.
        holds: the subject of its tests.
        budget_s: how long its tests in `make test` may take in total on two idle cores: wall time run one by one, or, for
            tests without processes, processor time.
        has_processes: whether its tests start any.
    """

    name: str
    holds: str
    budget_s: int
    has_processes: bool = True


RINGS = (
    Ring("core", "cores: events in, actions out", 30, has_processes=False),
    Ring("property", "cores in fake worlds that Hypothesis makes", 10, has_processes=False),
    Ring("simulation", "many agents' rendezvous, seeded faults, virtual time", 45, has_processes=False),
    Ring("shell", "shells with fake hosts, or on files and sockets", 15, has_processes=False),
    Ring("process", "one agent and its workers", 150),
    Ring("nodes", "several agents: rendezvous, stores, network namespaces", 90),
    Ring("torch", "workers with torch, and torchrun beside ours", 40),
    Ring("docs", "what pages show; examples; releases", 15),
    Ring("recipes", "what deploy/ holds, with other people's programs", 8),
    Ring("crowded", "environments as users have them", 0),
)
WITHOUT_PROCESSES = tuple(ring.name for ring in RINGS if not ring.has_processes)


def ring_of(path: Path) -> str:
    """The name of a test's ring; empty outside of `tests/`."""
    return path.relative_to(TESTS).parts[0] if path.is_relative_to(TESTS) else ""


def ring_of_id(nodeid: str) -> str:
    """The name of a test's ring, by pytest's id of the test."""
    folders = nodeid.partition("::")[0].split("/")
    return folders[1] if folders[0] == "tests" and len(folders) > 2 else ""


def write_durations(path: str | os.PathLike[str], seconds: Mapping[str, float]) -> None:
    """Writes how long each test took, by its id."""
    Path(path).write_text(json.dumps(seconds, indent=0))


def table(seconds: Mapping[str, float], *, is_judged: bool) -> Iterable[str]:
    """The time of each ring, as a table.

    Args:
        seconds: by the id of a test.
        is_judged: whether exactly the tests with a budget ran.
    """
    tests, took = Counter[str](), Counter[str]()
    for nodeid, duration in seconds.items():
        tests[ring_of_id(nodeid)] += 1
        took[ring_of_id(nodeid)] += duration  # type: ignore[assignment]  # a Counter adds up any numbers
    for ring in RINGS:
        if ring.name in tests:
            unit = "s" if ring.has_processes else "s of CPU"
            line = f"ring {ring.name:<11}{tests[ring.name]:>6} tests {took[ring.name]:>6.0f} {unit}"
            is_over = is_judged and took[ring.name] > ring.budget_s
            yield f"{line}   over its budget of {ring.budget_s} s (docs/development/tests.md)" if is_over else line
