"""Writes the pages that are made from the code: `make docs`.

With `--check` nothing is written: it names the pages that are stale, and exits with 1 if there are any.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import api_pages
import cli_page
import layers
import metrics_page
import rdzv_conf_page
import troubleshooting_page
from sources import ROOT

MAKERS: tuple[Callable[[], dict[str, str]], ...] = (
    api_pages.pages,
    cli_page.pages,
    metrics_page.pages,
    rdzv_conf_page.pages,
    troubleshooting_page.pages,
    layers.pages,
)


def stale_pages(makers: tuple[Callable[[], dict[str, str]], ...] = MAKERS) -> dict[str, str]:
    """The pages that the code no longer agrees with: what each should say, by its path below the root."""
    pages = {path: text for make in makers for path, text in make().items()}
    return {path: text for path, text in pages.items() if _text_at(path) != text}


def main() -> int:
    stale = stale_pages()
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is stale: run `make docs`")
        return 1 if stale else 0
    for path, text in stale.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
        print(f"{path} is written")
    return 0


def _text_at(path: str) -> str | None:
    return (ROOT / path).read_text() if (ROOT / path).exists() else None


if __name__ == "__main__":
    sys.exit(main())
