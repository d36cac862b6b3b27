"""Layers: none imports a higher one, there are no circles, cores never wait, and folders offer names."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import TypeAlias

import pytest
from layers import HEIGHT_OF, LAYERS
from sources import Source, source

PACKAGE = Path(__file__).parents[2] / "aelastic"

# Cores decide: they neither wait, nor look at the clock, the environment or the network.  Folders, and modules.
CORES = (
    "base.machine", "base.record", "rdzv.decisions", "observe.stimuli", "tools.timeline.chain", "rdzv.leader", "rdzv.member", "rdzv.log",
    "rdzv.protocol.addresses", "rdzv.protocol.codec", "rdzv.protocol.handshake", "rdzv.protocol.keys", "rdzv.protocol.messages",
    "rdzv.protocol.ranks", "rdzv.protocol.requests", "rdzv.protocol.seals", "rdzv.protocol.sense", "rdzv.protocol.waiting",
    "rdzv.stores.cell_events", "rdzv.stores.register", "rdzv.stores.register_attempt", "rdzv.stores.register_cells", "rdzv.stores.register_events",
    "rdzv.ledger", "rdzv.restart_policy", "rdzv.restart_rules", "rdzv.single_node",
    "agent.group.events", "agent.group.in_place", "agent.group.phases", "agent.group.restart_grace", "agent.group.worker_env",
    "agent.group.worker_group", "workers.numa", "workers.forkserver.command", "workers.forkserver.preload", "diagnose.hangs.timer_rules", "diagnose.hangs.hang_rules", "diagnose.failures.exit_reason", "diagnose.failures.root_cause",
    "logs.lines", "logs.live_lines", "logs.expected_output", "diagnose.stacks.format", "observe.metrics", "observe.prometheus",
    "observe.run_events", "observe.run_state", "observe.time_spent", "observe.status", "observe.status_text", "observe.torch_events_core", "tools.timeline.assets",
    "tools.timeline.boxes", "tools.timeline.chart", "tools.timeline.fields", "tools.timeline.html", "tools.timeline.merge", "tools.timeline.model", "tools.timeline.node_reader", "tools.timeline.perfetto",
    "tools.timeline.reader", "tools.timeline.text", "tools.spent.report",
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


def layer_of(module: str) -> str:
    """The folder, or the module at the top, that a module belongs to."""
    return module.partition(".")[0]


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


def test_every_folder_and_module_at_the_top_has_a_layer() -> None:
    assert {layer_of(module) for module in MODULES} == HEIGHT_OF.keys()


def test_a_stranger_finds_at_most_twelve_folders() -> None:
    assert len([layer for layer in LAYERS if layer.is_folder]) <= 12


def _imported_upwards(module: str) -> list[str]:
    height = HEIGHT_OF[layer_of(module)]
    others = [other for other in ours_in(module) if layer_of(other) != layer_of(module)]
    return [other for other in others if HEIGHT_OF[layer_of(other)] > height]


def test_no_import_runs_up_early_or_late() -> None:
    assert _without_empty({module: _imported_upwards(module) for module in MODULES}) == {}


def test_no_modules_import_each_other_in_a_circle() -> None:
    TopologicalSorter({module: ours_in(module) - {module} for module in MODULES}).prepare()  # raises, with the circle


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
