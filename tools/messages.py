"""The warnings and errors that the code can write, as texts with `…` where a value stands.

A message is the first argument of `_log.warning` or `_log.error`, or of an error of ours, or the reason of a verdict.
A text that is made elsewhere is followed to where it is made; one that only passes others on has none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from sources import Source, package

LEVELS = {"warning", "error", "exception", "critical"}
# What these raise becomes the reason in a line of the command line: "--nnodes 4:2: the minimum 4 is above …".
READERS = (
    "aelastic.base.texts", "aelastic.cli.options", "aelastic.diagnose.hangs.options", "aelastic.rdzv.settings",
    "aelastic.settings",
)  # fmt: skip
# What these return is what to use instead of a value; the others give it as the last argument of `rule`.
REMEDIES = ("aelastic.base.setting", "aelastic.diagnose.hangs.options", "aelastic.settings")
# In the rendezvous, what says why a round or a job ends, or a node or a connection is refused.
VERDICTS = {"Lost", "Refused", "_succeeded", "_refuse", "_drop", "_lose_quorum"}
# Makes the sentences about decisions.
WORDING = "aelastic.rdzv.decisions.wording"
LETTERS = re.compile(r"[A-Za-z]{2,}")
GAP = re.compile(r"(%[-+.\d]*[a-z]|\x00)+")


def messages() -> dict[str, list[str]]:
    """Each text, and the places that write it (`agent/run.py:12`)."""
    ours = exceptions()
    found = dict[str, list[str]]()
    for module in package():
        said: list[tuple[ast.expr, str]]
        said = [(call, text) for call, scope in _calls(module.tree) for text in _said(call, scope, module, ours)]
        said += [(value, text) for value in _remedies(module) for text in _texts(value, module.tree, module.tree)]
        for place, text in said:
            form = template(text)
            if len(LETTERS.findall(form)) > 1:  # or all of it is another's words
                found.setdefault(form, []).append(f"{module.file}:{place.lineno}")
    return found


def with_topics() -> dict[str, str]:
    """The topic of each log line that has one."""
    found = dict[str, str]()
    for module in package():
        for call, scope in _calls(module.tree):
            if (topic := _topic_of(call)) is not None:
                found |= dict.fromkeys(map(template, _texts(call.args[0], scope, module.tree)), topic)
    return found


def _topic_of(call: ast.Call) -> str | None:
    for keyword in call.keywords:
        match keyword:
            case ast.keyword("extra", ast.Dict([ast.Constant("topic")], [ast.Constant(str(topic))])):
                return topic
    return None


def sentences() -> set[str]:
    """Each text about a decision, or a part of one."""
    (module,) = (module for module in package() if module.name == WORDING)
    parts = {part for node in module.nodes if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    whole = [node for node in module.nodes if isinstance(node, ast.JoinedStr) or node not in parts]
    texts = [text for node in whole if isinstance(node, ast.expr) for text in _texts(node, module.tree, module.tree)]
    return {template(text) for text in texts}


def _remedies(module: Source) -> list[ast.expr]:
    if module.name not in REMEDIES:
        return []
    returned = [stmt.value for stmt in module.nodes if isinstance(stmt, ast.Return)]
    return [value for value in returned if isinstance(value, ast.JoinedStr | ast.Constant | ast.IfExp)]


def _said(call: ast.Call, scope: ast.AST, module: Source, ours: set[str]) -> list[str]:
    reasons = call.args if module.name.startswith("aelastic.rdzv.") and _last(call.func) in VERDICTS else []
    if _last(call.func) in {"rule", "read_as"}:
        reasons = call.args[1:]
    if call.args and _is_told(call.func, module, ours):
        first, *values = call.args
        reasons = values if isinstance(first, ast.Constant) and first.value == "%s" else [first]
    return [text for expr in reasons for text in _texts(expr, scope, module.tree)]


def exceptions() -> set[str]:
    """The names of the package's own classes of errors."""
    classes = [each for module in package() for each in module.nodes if isinstance(each, ast.ClassDef)]
    return {cls.name for cls in classes if cls.name.endswith("Error")}


def _is_told(called: ast.expr, module: Source, ours: set[str]) -> bool:
    if isinstance(called, ast.Attribute) and called.attr in LEVELS:
        return True
    if _last(called) in {"Warn", "warn", "_warn", "Waited"} or _is_super_init(called):
        return True
    return _last(called) in (ours | {"ValueError"} if module.name in READERS else ours)


def _is_super_init(called: ast.expr) -> bool:
    return isinstance(called, ast.Attribute) and called.attr == "__init__" and ast.unparse(called) == "super().__init__"


def _calls(tree: ast.Module) -> Iterator[tuple[ast.Call, ast.AST]]:
    """Every call, with the innermost function around it."""
    waiting: list[tuple[ast.AST, ast.AST]] = [(tree, tree)]
    for node, around in waiting:
        scope = node if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else around
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Call):
                yield child, scope
            waiting.append((child, scope))


def _texts(expr: ast.expr, scope: ast.AST, tree: ast.Module) -> list[str]:
    """What an expression may say, a NUL for each value in it."""
    match expr:
        case ast.Constant(value=str(text)):
            return [text]
        case ast.JoinedStr(values=parts):
            return ["".join(str(each.value) if isinstance(each, ast.Constant) else "\0" for each in parts)]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return [a + b for a in _texts(left, scope, tree) or ["\0"] for b in _texts(right, scope, tree) or ["\0"]]
        case ast.IfExp(body=body, orelse=orelse):
            return _texts(body, scope, tree) + _texts(orelse, scope, tree)
        case ast.Name() | ast.Attribute():
            made = _values_of(expr, scope) or _values_of(expr, tree)
            return [text for value in made if not isinstance(value, ast.Name) for text in _texts(value, scope, tree)]
        case ast.Call(func=called):
            made = [
                stmt.value
                for function in ast.walk(tree)
                if isinstance(function, ast.FunctionDef) and function.name == _last(called) and function is not scope
                for stmt in ast.walk(function)
                if isinstance(stmt, ast.Return) and isinstance(stmt.value, ast.Constant | ast.JoinedStr | ast.IfExp)
            ]
            return [text for value in made for text in _texts(value, tree, tree)]
        case _:
            return []


def _values_of(name: ast.expr, scope: ast.AST) -> list[ast.expr]:
    return [value for target, value in _assigned(scope) if target == ast.unparse(name)]


@cache
def _assigned(scope: ast.AST) -> list[tuple[str, ast.expr]]:
    return [(ast.unparse(stmt.targets[0]), stmt.value) for stmt in ast.walk(scope) if isinstance(stmt, ast.Assign)]


def _last(expr: ast.expr) -> str:
    return ast.unparse(expr).rpartition(".")[2]


def template(text: str) -> str:
    """A message with `…` for each value."""
    return " ".join(GAP.sub("…", text).split())
