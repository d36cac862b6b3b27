"""The page of the replicated log: its theory, and each rule with the function that keeps it.

The log is no core with phases: it is pure functions on records, and its modules are the chapters of the page.
"""

from __future__ import annotations

import ast

from markdown import code, lines, table
from sources import Source, source

PACKAGE = "aelastic.rdzv.log"
CHAPTERS = ("entries", "votes", "node", "leader", "cell")  # in the order in which they are read


def page(note: str) -> str:
    """The text of the page, below the note that it is generated."""
    package = source(PACKAGE)
    chapters = [part for name in CHAPTERS for part in _chapter(source(f"{PACKAGE}.{name}"))]
    return lines(
        note,
        "# The log",
        f"How agents agree: [`{_folder(package)}`](../../../{package.file}). "
        "[How rendezvous works](../../explanation/rendezvous.md) tells the same as a story.",
        package.docstring.strip(),
        *chapters,
    )


def caption() -> str:
    """The log in one sentence."""
    return source(PACKAGE).docstring.partition("  ")[0]


def _folder(package: Source) -> str:
    return package.file.removesuffix("/__init__.py")


def _chapter(module: Source) -> list[str]:
    stmts = [stmt for stmt in module.tree.body if not getattr(stmt, "name", "_").startswith("_")]
    records = [_row(stmt) for stmt in stmts if isinstance(stmt, ast.ClassDef)]
    functions = [_row(stmt) for stmt in stmts if isinstance(stmt, ast.FunctionDef) and ast.get_docstring(stmt)]
    tables = [table((head, ""), rows) for head, rows in (("record", records), ("function", functions)) if rows]
    return [f"## {module.name.rpartition('.')[2]}", module.docstring.strip(), *tables]


def _row(stmt: ast.ClassDef | ast.FunctionDef) -> tuple[str, str]:
    first = (ast.get_docstring(stmt) or "").partition("\n\n")[0]
    return code(stmt.name), " ".join(first.split())
