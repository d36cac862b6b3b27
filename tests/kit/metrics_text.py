"""Metrics as a scraper reads them, and the page that documents them."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def values(text: str) -> dict[str, float]:
    """Values in the text format, by name and labels."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, number = line.rpartition(" ")
            assert re.fullmatch(r'[a-z_]+(\{([a-z_]+="([^"\\\n]|\\["\\n])*",?)+\})?', name), line
            assert name not in found, f"twice: {line}"
            found[name] = float(number)
    return found
