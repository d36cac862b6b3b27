"""Texts of the timeline for people: lengths of time, counts, and text from a log made harmless."""

from __future__ import annotations

import html

from aelastic.diagnose.failures.failure import printable
from aelastic.observe.status_text import counted as counted  # noqa: PLC0414  offered here


def safe(text: object) -> str:
    """Returns text from a log as HTML: nothing in it is markup."""
    return html.escape(printable(str(text)))


def duration(seconds: float) -> str:
    """Returns a length of time for people, as in `48 ms` or `1 h 12 min`."""
    if seconds < 0.00095:
        return f"{seconds * 1e3:.2g} ms" if seconds > 0 else "0"
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"
