"""What an expression of a core may change, as far as its text tells."""

from __future__ import annotations

import ast

from sources import Source, fields_of, find, methods_of, own_method, unparse

# What changes a container.
MUTATORS = {
    *("add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove"),
    *("setdefault", "subtract", "update"),
}


def changes_its_object(node: ast.AST) -> bool:
    match node:
        case ast.Assign(targets=targets):
            return any(unparse(each).startswith("self.") for each in targets)
        case ast.AugAssign(target=target) | ast.AnnAssign(target=target):
            return unparse(target).startswith("self.")
        case ast.Delete():
            return True
        case ast.Call(func=ast.Attribute(value=value, attr=name)):
            return name in MUTATORS and unparse(value).startswith("self.")
        case _:
            return False


def children(node: ast.AST) -> list[ast.expr]:
    """The expressions right below, those in comprehensions among them, in the order in which they stand."""
    found = list[ast.expr]()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            found.append(child)
        elif isinstance(child, ast.comprehension):
            found += [child.iter, *child.ifs]
    return found


class Parts:
    """The parts of a core: fields whose classes are ours (`self.roster`)."""

    def __init__(self, module: Source, cls: ast.ClassDef, actions: frozenset[str]) -> None:
        self._module, self._actions = module, actions
        self._kinds = {each.name: each.type.partition(" |")[0] for each in fields_of(module, cls)}
        self._known: dict[str, tuple[tuple[str, ...], bool]] = {}

    def effects(self, called: str) -> tuple[tuple[str, ...], bool]:
        """Of a call (`self.roster.put`): the actions that the method names, and whether it changes the part."""
        if called not in self._known:
            self._known[called] = self._effects(called)
        return self._known[called]

    def _effects(self, called: str) -> tuple[tuple[str, ...], bool]:
        _, part, *_, method = [*called.split("."), ""] if called.count(".") == 1 else called.split(".")
        kind = self._kinds.get(part, "")
        found = find(self._module, kind) if kind.isidentifier() else None
        if found is None or not isinstance(found[1], ast.ClassDef) or method not in methods_of(found[1]):
            return (), method in MUTATORS
        names, is_changed = list[str](), False
        methods, seen, todo = methods_of(found[1]), set[str](), [method]
        while todo:
            one = todo.pop(0)
            if one in seen or one not in methods:
                continue
            seen.add(one)
            for node in ast.walk(methods[one]):
                is_changed |= changes_its_object(node)
                if isinstance(node, ast.Call):
                    names.append(unparse(node.func).rpartition(".")[2])
                    todo.append(own_method(node) or "")
        return tuple(f"{name}?" for name in dict.fromkeys(names) if name in self._actions), is_changed
