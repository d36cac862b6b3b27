"""The arguments that benchmarks have in common: how often, which of the figures, and where to write them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


class Arguments(argparse.ArgumentParser):
    """Parser of a benchmark's arguments, to which its own may be added.

    Args:
        description: what it measures.
        repeat: how often, if that is not said.
        keys: what `--only` may choose from; none: there is no such choice.
        seconds: how long each run takes, if that is not said; `None`: that is not to be chosen.
    """

    def __init__(
        self, description: str, *, repeat: int, keys: Sequence[str] = (), seconds: float | None = None
    ) -> None:
        super().__init__(description=description)
        self._keys = keys
        self.add_argument("--repeat", type=int, default=repeat, metavar="N", help="runs of each (default: %(default)s)")
        if keys:
            text = f"some of {','.join(keys)}"
            self.add_argument("--only", type=lambda text: text.split(","), default=list(keys), help=text)
        if seconds is not None:
            text = "length of each (default: %(default)s)"
            self.add_argument("--seconds", type=float, default=seconds, metavar="S", help=text)
        self.add_argument("--out", type=Path, default=Path(__file__).parent / "results", metavar="FOLDER")

    def read(self) -> argparse.Namespace:
        """The arguments of this program; ends it where they make no sense."""
        options = self.parse_args()
        if self._keys and (unknown := set(options.only) - set(self._keys)):
            self.error(f"--only knows {', '.join(self._keys)}; not {', '.join(sorted(unknown))}")
        if options.repeat < 1:
            self.error("--repeat needs at least 1")
        if getattr(options, "seconds", 1.0) <= 0:
            self.error("--seconds needs more than 0")
        return options
