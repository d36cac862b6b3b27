"""The cores of the package, read as text: which classes they are, and what they assert of themselves.

A core derives from `aelastic.base.machine.Machine[Event, Action]`.
"""

from __future__ import annotations

import ast
from functools import cache

from sources import Source, fields_of, find, methods_of, own_method, package, unparse


@cache
def all_cores() -> list[tuple[Source, ast.ClassDef]]:
    """Every class that derives from `Machine[Event, Action]`, with its module."""
    return [
        (module, stmt)
        for module in package()
        if "(Machine[" in module.text  # most modules need not be parsed
        for stmt in module.tree.body
        if isinstance(stmt, ast.ClassDef) and is_core(stmt)
    ]


def is_core(cls: ast.ClassDef) -> bool:
    return any(unparse(base).startswith("Machine[") for base in cls.bases)


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
