"""A core as its page shows it: phases, events, actions, fields, invariants, and the ways through each pair.

A core derives from `aelastic.base.machine.Machine[Event, Action]`.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from functools import cache

from sources import Source, fields_of, find, members_of_union, methods_of, own_method, unparse
from ways import UndecidedError, Walker, Way


@dataclass
class Core:
    """A core, as its pages show it."""

    module: Source
    cls: ast.ClassDef
    phases: dict[str, str]  # with their comments
    first_phase: str
    events: list[tuple[str, str]]  # with their captions
    actions: list[tuple[str, str]]
    ways: dict[tuple[str, str], list[Way]] = field(default_factory=dict)  # by phase and event

    @property
    def name(self) -> str:
        return self.cls.name


@cache
def read_core(module: Source, class_name: str) -> Core:
    """Reads one core.

    Raises:
        UndecidedError: a pair of phase and event falls through all cases.
    """
    cls = module.definition(class_name)
    assert isinstance(cls, ast.ClassDef), f"{module.name} has no class {class_name}"
    events, actions = (members_of_union(module, each) for each in _machine_arguments(cls))
    home, phase_cls, first = _phases_of(module, cls)
    phases = {name: home.comment_of(stmt) for name, stmt in _enum_members(phase_cls)}
    core = Core(
        module,
        cls,
        phases,
        first,
        [(each.name, _caption(each)) for _, each in events],
        [(each.name, _caption(each)) for _, each in actions],
    )
    for phase in phases:
        for event, _ in core.events:
            walker = Walker(module, cls, phase_cls.name, event, frozenset(name for name, _ in core.actions))
            try:
                ways = [replace(way, held=(), kinds=()) for way in walker.through(phase)]
            except UndecidedError as error:
                raise UndecidedError(f"{core.name}: {event} in phase {phase} is not decided: {error}") from None
            core.ways[phase, event] = list(dict.fromkeys(ways))
    return core


def invariants_of(module: Source, cls: ast.ClassDef, of: str = "self") -> list[tuple[str, str]]:
    """What `validate` asserts, of the core and of its parts: the condition, and its sentence."""
    methods = methods_of(cls)
    parts = {f"self.{each.name}.validate": each for each in fields_of(module, cls)}
    found = list[tuple[str, str]]()

    def read(name: str) -> None:
        for node in ast.walk(methods[name]):
            if isinstance(node, ast.Assert):
                found.append((unparse(node.test).replace("self.", f"{of}."), _text_of(node.msg)))
            elif isinstance(node, ast.Call) and (part := parts.get(unparse(node.func))):
                home = find(module, part.type.partition(" |")[0])
                assert home is not None and isinstance(home[1], ast.ClassDef)
                found.extend(invariants_of(home[0], home[1], f"{of}.{part.name}"))
            elif (called := own_method(node)) in methods and called != name:
                read(str(called))

    if "validate" in methods:
        read("validate")
    return found


def is_core(cls: ast.ClassDef) -> bool:
    return any(unparse(base).startswith("Machine[") for base in cls.bases)


def _machine_arguments(cls: ast.ClassDef) -> list[ast.expr]:
    for base in cls.bases:
        if isinstance(base, ast.Subscript) and isinstance(base.slice, ast.Tuple) and unparse(base.value) == "Machine":
            return base.slice.elts
    raise LookupError(f"{cls.name} does not derive from Machine[Event, Action]")


def _phases_of(module: Source, cls: ast.ClassDef) -> tuple[Source, ast.ClassDef, str]:
    for stmt in cls.body:
        if isinstance(stmt, ast.AnnAssign) and unparse(stmt.target) == "phase" and stmt.value is not None:
            found = find(module, stmt.annotation)
            assert found is not None and isinstance(found[1], ast.ClassDef)
            return found[0], found[1], unparse(stmt.value).rpartition(".")[2]
    raise LookupError(f"{cls.name} has no field `phase`")


def _enum_members(cls: ast.ClassDef) -> list[tuple[str, ast.stmt]]:
    return [
        (target.id, stmt)
        for stmt in cls.body
        if isinstance(stmt, ast.Assign)
        for target in stmt.targets
        if isinstance(target, ast.Name)
    ]


def _caption(cls: ast.ClassDef) -> str:
    return " ".join((ast.get_docstring(cls) or "").partition("\n\n")[0].split())


def _text_of(message: ast.expr | None) -> str:
    match message:
        case None:
            return ""
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in values)
        case _:
            return unparse(message)
