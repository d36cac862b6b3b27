"""Metrics as a scraper reads them, and where they are documented."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def values(text: str) -> dict[str, float]:
    """What the text says, by name and labels: line by line, as the format has it."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, number = line.rpartition(" ")
            assert re.fullmatch(r'[a-z_]+(\{([a-z_]+="([^"\\\n]|\\["\\n])*",?)+\})?', name), line
            assert name not in found, f"twice: {line}"
            found[name] = float(number)
    return found
