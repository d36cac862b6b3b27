"""Layers: lower ones never import higher ones, cycles are forbidden, cores never wait, folders export names."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeAlias

import pytest
from sources import Source, source

PACKAGE = Path(__file__).parents[2] / "aelastic"

# From the bottom up.  A module may import from its own folder and from the layers below.  A name is a folder, or a
# module in a different layer from the rest of its folder.
FLOORS = (
    ("core.record", "host.files", "host.signals", "training"),
    ("host", "failures", "health_check_server"),
    ("aio",),
    ("errors",),
    ("core",),
    ("rdzv.log", "rdzv.ledger", "rdzv.restart_rules", "rdzv.protocol.keys"),
    ("rdzv.protocol.handshake", "rdzv.protocol.seals", "rdzv.protocol.secret_file"),
    ("decisions",),
    ("rdzv.settings", "rdzv.restart_policy"),
    ("settings",),
    ("spec",),
    ("logs_specs",),
    ("training",),
    ("rdzv.protocol", "workers.numa", "notice"),
    ("rdzv.leader.drain", "rdzv.stores.cell_events"),
    ("rdzv.leader",),
    ("rdzv.member", "group", "forkserver.command"),
    ("observe",),
    ("workers", "tcpstore", "stacks", "hangs", "health", "forkserver", "export"),
    ("logs",),
    ("procs", "ui", "rdzv.stores"),
    ("rdzv.protocol.incoming", "rdzv.protocol.listening"),
    ("rdzv",),
    ("result",),
    ("agent",),
    ("supervisor", "event_log", "sd_notify"),
    ("doctor",),
    ("manual",),
    ("timeline",),
    ("spent", "rehearse"),
    ("cli",),
    ("launcher",),
    ("launch", "run", "__main__", "elastic_agent"),
    ("under",),
)
FLOOR_OF = {place: floor for floor, places in enumerate(FLOORS) for place in places}

# Cores decide: they don't wait, or read the clock, the environment or the network.  Folders and modules.
CORES = (
    "core", "decisions", "rdzv.leader", "rdzv.member", "rdzv.log",
    "rdzv.protocol.addresses", "rdzv.protocol.codec", "rdzv.protocol.handshake", "rdzv.protocol.keys", "rdzv.protocol.messages",
    "rdzv.protocol.ranks", "rdzv.protocol.requests", "rdzv.protocol.seals", "rdzv.protocol.sense", "rdzv.protocol.waiting",
    "rdzv.stores.cell_events", "rdzv.stores.register", "rdzv.stores.register_attempt", "rdzv.stores.register_cells", "rdzv.stores.register_events",
    "rdzv.ledger", "rdzv.restart_policy", "rdzv.restart_rules", "rdzv.single_node",
    "group.events", "group.in_place", "group.phases", "group.restart_grace", "group.worker_env",
    "group.worker_group", "workers.numa", "forkserver.command", "forkserver.preload", "hangs.timer_rules", "hangs.hang_rules", "failures.exit_reason", "failures.root_cause",
    "logs.lines", "logs.live_lines", "logs.expected_output", "stacks.format", "observe.metrics", "observe.prometheus",
    "observe.run_events", "observe.run_state", "observe.time_spent", "observe.status", "observe.status_text", "observe.torch_events_core", "timeline.assets",
    "timeline.boxes", "timeline.chart", "timeline.fields", "timeline.html", "timeline.merge", "timeline.model", "timeline.node_reader", "timeline.perfetto",
    "timeline.reader", "timeline.text", "spent.bill",
)  # fmt: skip
NOT_FOR_CORES = {"anyio", "asyncio", "os", "time", "socket", "subprocess", "random", "logging", "torch", "threading"}


def source_of(module: str) -> Source:
    return source(f"aelastic.{module}".removesuffix("."))


Findings: TypeAlias = dict[str, list[str]]  # by the module or the folder


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").removesuffix(".")


FILES = {_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
MODULES = [name for name in FILES if name]  # `aelastic/__init__.py` only holds names, imported on use
FOLDERS = [name for name, path in FILES.items() if path.name == "__init__.py"]


def _without_empty(findings: Findings) -> Findings:
    return {name: sorted(found) for name, found in findings.items() if found}


def folder_of(module: str) -> str:
    return module if module in FOLDERS else module.rpartition(".")[0]


def is_within(name: str, place: str) -> bool:
    return f"{name}.".startswith(f"{place}.")


def place_of(module: str) -> str:
    """The entry of `FLOORS` for a module: the longest one that prefixes its name."""
    parts = module.split(".")
    prefixes = (".".join(parts[:count]) for count in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in FLOOR_OF), "")


CORE_MODULES = [module for module in MODULES if any(is_within(module, core) for core in CORES)]


def nodes_of(module: str) -> list[ast.AST]:
    return source_of(module).nodes


@cache
def imports_of(module: str) -> frozenset[str]:
    """Dotted names of a module's imports, at the top or inside functions; ours begin with `aelastic.`."""
    found = set()
    for node in nodes_of(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name.removeprefix("aelastic.") in FILES else node.module for name in names}
    return frozenset(found)


@cache
def ours_in(module: str) -> set[str]:
    """Our own modules that a module imports, named relative to `aelastic`."""
    return {name.removeprefix("aelastic.") for name in imports_of(module) if name.startswith("aelastic.")}


def offered_by(folder: str) -> list[str] | None:
    """The modules that others may import, from the folder's `__all__`."""
    for node in source_of(folder).tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and "__all__" in ast.unparse(node) and node.value:
            return list(ast.literal_eval(node.value))
    return None


def test_every_module_has_a_floor() -> None:
    assert [module for module in MODULES if not place_of(module)] == []


def _from_too_high(module: str) -> list[str]:
    place = place_of(module)
    elsewhere = [(other, place_of(other)) for other in ours_in(module) if place_of(other) != place]
    return [other for other, its_place in elsewhere if FLOOR_OF[its_place] >= FLOOR_OF[place]]


def test_a_module_imports_from_its_own_folder_and_from_lower_floors_only_and_none_in_a_circle() -> None:
    assert _without_empty({module: _from_too_high(module) for module in MODULES}) == {}
    # No cycles, either.
    TopologicalSorter({module: ours_in(module) - {module} for module in MODULES}).prepare()  # raises, with the cycle


def test_a_core_imports_nothing_that_waits() -> None:
    packages = {module: {name.partition(".")[0] for name in imports_of(module)} for module in CORE_MODULES}
    assert _without_empty({module: [*(used & NOT_FOR_CORES)] for module, used in packages.items()}) == {}


def _written_in(node: ast.AST) -> list[ast.expr]:
    """The targets of an assignment, without subscripts."""
    match node:
        case ast.Assign(targets):
            found = targets
        case ast.AugAssign(target) | ast.AnnAssign(target):
            found = [target]
        case _:
            found = []
    each = [part for target in found for part in (target.elts if isinstance(target, ast.Tuple) else [target])]
    return [part.value if isinstance(part, ast.Subscript) else part for part in each]


def _foreign_fields(module: str) -> list[str]:
    written = [part for node in nodes_of(module) for part in _written_in(node)]
    foreign = [part for part in written if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Attribute)]
    return [ast.unparse(part) for part in foreign]


def test_no_part_of_a_core_writes_another_ones_field() -> None:
    """Only a part's own methods change it, so its reader sees everything that does."""
    assert _without_empty({module: _foreign_fields(module) for module in CORE_MODULES}) == {}


def _used_though_not_offered(folder: str) -> list[str]:
    outside = [module for module in FILES if not is_within(folder_of(module), folder)]
    used = {other for module in outside for other in ours_in(module) if folder_of(other) == folder}
    offered = offered_by(folder)
    if offered is None:
        return ["its `__init__` has no `__all__`"]
    return [*(used - {f"{folder}.{name}" for name in offered})]


def test_others_import_only_what_a_folder_offers() -> None:
    assert _without_empty({folder: _used_though_not_offered(folder) for folder in FOLDERS if folder}) == {}


def test_each_file_of_tests_has_a_name_of_its_own() -> None:
    """pytest can't collect two rings that contain a file of the same name."""
    names = [path.name for path in Path(__file__).parents[1].rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_every_public_name_can_be_imported() -> None:
    import aelastic

    assert [name for name in aelastic.__all__ if getattr(aelastic, name, None) is None] == []
    assert set(aelastic.__all__) <= set(dir(aelastic))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = aelastic.nonsense
