"""Rewrites the results in every story file; review the changes as a diff.

PYTHONPATH=.:tests python -m kit.stories
"""

from __future__ import annotations

import sys

from kit.stories import every
from kit.stories.files import rewritten


def main() -> None:
    for path, player in (every.CORE | every.SHELL).items():
        text = rewritten(path, player)
        if text != path.read_text():
            path.write_text(text)
            sys.stdout.write(f"{path} is rewritten\n")


if __name__ == "__main__":
    main()
