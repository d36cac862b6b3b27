"""The few pieces of Markdown that the generated pages are made of."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    every = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in every)


def lines(*parts: str) -> str:
    """Paragraphs, and an end of line."""
    return "\n\n".join(part.rstrip() for part in parts if part.strip()) + "\n"


def code(text: str) -> str:
    return f"`{text}`"
