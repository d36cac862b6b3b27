"""Reads modules of the package as text: their trees, their comments, and where a name comes from.

Nothing is imported: a page is generated in a second, on a machine without torch.
"""

from __future__ import annotations

import ast
import io
import tokenize
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, eq=False)
class Source:
    """One module: its tree, and the comments at the end of its lines."""

    name: str
    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Of the whole tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def comments(self) -> dict[int, str]:
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return {
            token.start[0]: token.string.lstrip("# ").strip()
            for token in tokens
            if token.type == tokenize.COMMENT
            and token.line.strip() != token.string
            and not _is_for_a_tool(token.string)
        }

    @property
    def file(self) -> str:
        """Its path below the root of the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.tree) or ""

    def comment_of(self, node: ast.AST) -> str:
        """The comment behind a statement: on its first line, or else on its last."""
        first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
        return self.comments.get(first) or self.comments.get(last) or ""

    def definition(self, name: str) -> ast.stmt | None:
        """The class, the function or the assignment at the top of the module that makes a name."""
        return next((stmt for stmt in _top_level(self.tree) if name in _names_made_by(stmt)), None)


@dataclass(frozen=True)
class Field:
    """A field of a dataclass, with the comment behind it."""

    name: str
    type: str
    comment: str


@cache
def source(name: str) -> Source:
    """The module of this dotted name."""
    base = ROOT.joinpath(*name.split("."))
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return Source(name, path, path.read_text())


@cache
def unparse(node: ast.AST) -> str:
    """The text of a node: a page asks for that of the same nodes again and again."""
    return ast.unparse(node)


def package() -> list[Source]:
    """Every module of the package, in the order of the names."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in sorted(ROOT.glob("aelastic/**/*.py"))]
    return [source(".".join(path.parts).removesuffix(".__init__")) for path in paths]


def is_module(name: str) -> bool:
    base = ROOT.joinpath(*name.split("."))
    return base.with_suffix(".py").exists() or (base / "__init__.py").exists()


def find(module: Source, expr: ast.expr | str) -> tuple[Source, ast.stmt] | None:
    """Where a name that a module uses (`Exited`, `ev.Exited`) is defined: the module, and the definition."""
    dotted = expr if isinstance(expr, str) else ast.unparse(expr)
    first, _, rest = dotted.partition(".")
    if not rest and (made := module.definition(first)) and not isinstance(made, ast.Import | ast.ImportFrom):
        return module, made
    for stmt in _top_level(module.tree):
        if not isinstance(stmt, ast.ImportFrom) or not (stmt.module or "").startswith("aelastic"):
            continue
        for alias in stmt.names:
            if (alias.asname or alias.name) != first:
                continue
            if is_module(f"{stmt.module}.{alias.name}"):
                return find(source(f"{stmt.module}.{alias.name}"), rest) if rest else None
            return find(source(str(stmt.module)), alias.name)
    return None


def fields_of(module: Source, cls: ast.ClassDef) -> list[Field]:
    return [
        Field(stmt.target.id, ast.unparse(stmt.annotation), module.comment_of(stmt))
        for stmt in cls.body
        if isinstance(stmt, ast.AnnAssign) and isinstance(stmt.target, ast.Name)
    ]


def methods_of(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {stmt.name: stmt for stmt in cls.body if isinstance(stmt, ast.FunctionDef)}


def own_method(node: ast.AST | None) -> str | None:
    """`name`, of a call `self.name(…)`."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Name(id="self"), attr=name)):
            return name
        case _:
            return None


def _top_level(tree: ast.Module) -> list[ast.stmt]:
    """The statements at the top, those under `if TYPE_CHECKING:` among them."""
    found = list[ast.stmt]()
    for stmt in tree.body:
        found += stmt.body if isinstance(stmt, ast.If) else [stmt]
    return found


def _names_made_by(stmt: ast.stmt) -> list[str]:
    match stmt:
        case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            return [stmt.name]
        case ast.Assign():
            return [target.id for target in stmt.targets if isinstance(target, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def _is_for_a_tool(comment: str) -> bool:
    return comment.startswith(("# noqa", "# type:", "# pragma:"))
