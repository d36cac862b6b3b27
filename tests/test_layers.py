"""The house keeps its layers: lower never imports higher, cores import nothing that waits."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "aelastic"

# Room to layer.  A new room must be placed here, or the first test fails.
LAYERS = {
    "": 0,  # aelastic/__init__.py: names only, imported when used
    "error_files": 0,
    "failures": 0,
    "errors": 0,
    "causes": 0,
    "report": 0,
    "record": 0,
    "spec": 0,
    "rdzv.settings": 0,
    "rdzv": 1,
    "rdzv.board": 1,
    "rdzv.boards": 2,
    "rdzv.boards.c10d": 2,
    "rdzv.boards.endpoints": 2,
    "rdzv.boards.etcd": 2,
    "rdzv.boards.etcd_http": 2,
    "rdzv.boards.etcd_settings": 2,
    "rdzv.boards.etcd_v2": 2,
    "rdzv.boards.etcd_v3": 2,
    "rdzv.boards.etcd_v3_calls": 2,
    "rdzv.boards.inprocess": 2,
    "rdzv.boards.reign_text": 2,
    "rdzv.boards.static": 2,
    "rdzv.boards.tcp_store": 2,
    "rdzv.boards.texts": 2,
    "rdzv.messages": 1,
    "rdzv.coordinator": 1,
    "rdzv.tenure": 1,
    "rdzv.link": 1,
    "group": 1,
    "group_events": 1,
    "policy": 1,
    "numa": 1,
    "telemetry": 1,
    "happenings": 1,
    "narrator": 1,
    "event_records": 1,
    "event_log": 2,
    "sd_notify": 2,
    "observer": 1,
    "live_text": 1,
    "metrics": 1,
    "run_metrics": 1,
    "status": 1,
    "usage": 2,
    "health": 2,
    "health_address": 2,
    "health_check_server": 0,
    "health_door": 2,
    "health_guest": 2,
    "health_stacks": 2,
    "timers": 1,
    "watch": 1,
    "ranks": 1,
    "env": 1,
    "workers": 1,
    "guard": 2,
    "children": 2,
    "control_sockets": 2,
    "accepting": 2,
    "mailbox": 2,
    "inotify": 2,
    "watchdog": 2,
    "oom": 2,
    "affinity": 2,
    "topology": 2,
    "torch_telemetry": 2,
    "procs": 2,
    "functions": 2,
    "logs": 2,
    "logs_specs": 0,
    "lines": 0,
    "terminal": 2,
    "expected": 0,
    "liveness": 1,
    "pulse": 2,
    "following": 2,
    "console": 2,
    "store": 2,
    "store_process": 2,
    "store_server": 2,
    "rdzv.addresses": 1,
    "rdzv.wire": 1,
    "rdzv.chair": 1,
    "rdzv.chair_events": 1,
    "rdzv.member_events": 1,
    "rdzv.recovery": 1,
    "rdzv.roll_call": 1,
    "rdzv.member": 1,
    "rdzv.inproc": 2,
    "rdzv.stream": 2,
    "rdzv.server": 2,
    "rdzv.agent_link": 2,
    "rdzv.registry": 2,
    "rdzv.for_torchrun": 2,
    "rdzv.for_torchrun.handler": 2,
    "rdzv.for_torchrun.keys": 2,
    "rdzv.for_torchrun.keys_thread": 2,
    "rdzv.torch_calls": 2,
    "rdzv.torch_handler": 2,
    "stack_text": 1,
    "stack_hook": 2,
    "stacks": 2,
    "autopsy": 3,
    "condemning": 3,
    "log_lines": 3,
    "run_result": 3,
    "force": 3,
    "watching": 3,
    "supervisor": 3,
    "option_values": 4,
    "options": 4,
    "command_line": 4,
    "meeting": 4,
    "output": 4,
    "arguments": 4,
    "cli": 4,
    "live_line": 4,
    "live_view": 4,
    "launch_config": 4,
    "blocking_run": 4,
    "timeline_log": 4,
    "timeline_story": 4,
    "timeline_look": 4,
    "timeline_chart": 4,
    "timeline_page": 4,
    "timeline_trace": 4,
    "timeline": 4,
    "launch": 5,
    "run": 5,
    "__main__": 4,
}
# Cores decide: they neither wait, nor look at the clock, the environment or the network.
CORES = (
    "rdzv.messages",
    "rdzv.addresses",
    "rdzv.wire",
    "rdzv.coordinator",
    "rdzv.chair",
    "rdzv.member",
    "rdzv.recovery",
    "rdzv.roll_call",
    "rdzv.member_events",
    "rdzv.chair_events",
    "group",
    "group_events",
    "policy",
    "numa",
    "timers",
    "telemetry",
    "happenings",
    "narrator",
    "live_text",
    "stack_text",
    "event_records",
    "metrics",
    "run_metrics",
    "status",
    "ranks",
    "env",
    "lines",
    "expected",
    "liveness",
    "causes",
    "timeline_log",
    "timeline_story",
    "timeline_look",
    "timeline_chart",
    "timeline_page",
    "timeline_trace",
)
NOT_FOR_CORES = {"anyio", "asyncio", "os", "time", "socket", "subprocess", "random", "logging", "torch", "threading"}
# Layer-2 rooms do not import each other, but for the tools that several of them share.
SHARED_TOOLS = {"accepting", "affinity", "guard", "children", "mailbox", "inotify", "store_process", "usage"}
OWN_CHILDREN = {
    ("procs", "functions"),
    ("health", "health_address"),
    ("health", "health_door"),
    ("health", "health_guest"),
    ("health", "health_stacks"),
    ("logs", "console"),
    ("logs", "following"),
    ("console", "following"),
    ("console", "terminal"),
}


def rooms() -> list[str]:
    names = [path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".") for path in PACKAGE.rglob("*.py")]
    return sorted(name.removesuffix("__init__").removesuffix(".") for name in names)


def imports_of(room: str) -> set[str]:
    base = PACKAGE / room.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            found |= {f"aelastic.{alias.name}" for alias in node.names} if module == "aelastic" else {module}
    return found


def ours(modules: set[str]) -> set[str]:
    return {m.removeprefix("aelastic.") for m in modules if m.startswith("aelastic.")} & set(LAYERS)


def test_every_room_has_a_layer() -> None:
    assert rooms() == sorted(LAYERS)


@pytest.mark.parametrize("room", [room for room in LAYERS if room])
def test_a_room_imports_lower_layers_only(room: str) -> None:
    higher = {other for other in ours(imports_of(room)) if LAYERS[other] > LAYERS[room]}

    assert not higher


@pytest.mark.parametrize("room", [room for room in LAYERS if LAYERS[room] == 2 and not room.startswith("rdzv")])
def test_shells_do_not_import_each_other(room: str) -> None:
    shells = {other for other in ours(imports_of(room)) if LAYERS[other] == 2} - SHARED_TOOLS

    assert {(room, other) for other in shells} <= OWN_CHILDREN


@pytest.mark.parametrize("room", CORES)
def test_a_core_imports_nothing_that_waits(room: str) -> None:
    assert not {module.partition(".")[0] for module in imports_of(room)} & NOT_FOR_CORES


@pytest.mark.parametrize("module", ["aelastic", "aelastic.supervisor", "aelastic.cli"])
def test_importing_pulls_in_neither_torch_nor_aiohttp(module: str) -> None:
    code = f"import {module}, sys; print(sorted({{'torch', 'aiohttp', 'numpy'}} & set(sys.modules)))"

    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert seen.stdout == "[]\n"


def test_importing_the_package_alone_imports_none_of_its_rooms() -> None:
    code = "import aelastic, sys; print([name for name in sys.modules if name.startswith('aelastic.')])"

    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert seen.stdout == "[]\n"


def test_every_public_name_can_be_imported() -> None:
    import aelastic

    missing = [name for name in aelastic.__all__ if getattr(aelastic, name, None) is None]

    assert not missing
    assert set(aelastic.__all__) <= set(dir(aelastic))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = aelastic.nonsense
