"""The house keeps its layers: lower never imports higher, cores import nothing that waits, folders have doors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "aelastic"

# From the ground up.  A room may import from its own folder, and from the floors below its own.  A name is a folder, or a
# module that stands on another floor than the rest of its folder.
FLOORS = (
    ("core.record",),
    ("aio", "host", "failures", "health_check_server", "stack_hook"),
    ("errors",),
    ("core",),
    ("rdzv.settings",),
    ("spec",),
    ("logs_specs",),
    ("rdzv.protocol", "rdzv.board", "workers.numa"),
    ("rdzv.coordinator", "rdzv.member"),
    ("group",),
    ("observe",),
    ("workers", "tcpstore", "stacks", "hangs", "health"),
    ("logs",),
    ("procs", "ui", "rdzv.boards", "rdzv.torch_handler"),
    ("rdzv.torchrun_plugin",),
    ("rdzv",),
    ("result",),
    ("agent",),
    ("supervisor", "event_log", "sd_notify"),
    ("cli", "timeline"),
    ("launcher",),
    ("launch", "run", "__main__"),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Cores decide: they neither wait, nor look at the clock, the environment or the network.  Folders, and modules.
CORES = (
    "core",
    "rdzv.protocol",
    "rdzv.coordinator",
    "rdzv.member",
    "group.events",
    "group.worker_env",
    "group.worker_group",
    "workers.numa",
    "hangs.timer_rules",
    "hangs.hang_rules",
    "failures.exit_reason",
    "logs.lines",
    "logs.expected_output",
    "stacks.format",
    "observe.metrics",
    "observe.prometheus",
    "observe.run_event_source",
    "observe.run_events",
    "observe.status",
    "observe.status_text",
    "observe.torch_events_core",
    "timeline.assets",
    "timeline.html",
    "timeline.model",
    "timeline.perfetto",
    "timeline.reader",
    "timeline.svg",
)
NOT_FOR_CORES = {"anyio", "asyncio", "os", "time", "socket", "subprocess", "random", "logging", "torch", "threading"}
MODULES_MAX = 15  # of a folder
LINES_MAX = 400  # of a file


def _name(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
FOLDERS = sorted({path.parent for path in FILES.values()})


def imports_of(room: str) -> set[str]:
    """The modules that a room imports, early or late; of our own by their dotted names below `aelastic`."""
    found = set()
    for node in ast.walk(ast.parse(FILES[room].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            ours = {
                each for each in submodules if each.removeprefix("aelastic.") in FILES and each.startswith("aelastic.")
            }
            found |= ours
            if len(ours) < len(node.names):
                found.add(node.module)
    return found


def ours(modules: set[str]) -> set[str]:
    return {m.removeprefix("aelastic.") for m in modules if m.startswith("aelastic.")} & set(FILES)


def place(room: str) -> str:
    """The entry of `FLOORS` that a room belongs to: the longest that its name begins with."""
    return max((name for name in FLOOR_OF if f"{room}.".startswith(f"{name}.")), key=len, default="")


ROOMS = [room for room in FILES if room]  # `aelastic/__init__.py` holds names only, imported when used


def test_every_room_has_a_floor() -> None:
    assert [room for room in ROOMS if not place(room)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_from_its_own_folder_and_from_lower_floors_only(room: str) -> None:
    others = {other for other in ours(imports_of(room)) if place(other) != place(room)}

    higher = {other for other in others if FLOOR_OF[place(other)] >= FLOOR_OF[place(room)]}
    assert not higher


@pytest.mark.parametrize("room", [room for room in ROOMS if f"{room}.".startswith(tuple(f"{core}." for core in CORES))])
def test_a_core_imports_nothing_that_waits(room: str) -> None:
    assert not {module.partition(".")[0] for module in imports_of(room)} & NOT_FOR_CORES


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(PACKAGE.parent).as_posix())
def test_a_folder_has_room_for_what_a_person_can_hold_in_mind(folder: Path) -> None:
    assert len(list(folder.glob("*.py"))) <= MODULES_MAX


def test_every_public_name_can_be_imported() -> None:
    import aelastic

    missing = [name for name in aelastic.__all__ if getattr(aelastic, name, None) is None]

    assert not missing
    assert set(aelastic.__all__) <= set(dir(aelastic))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = aelastic.nonsense
