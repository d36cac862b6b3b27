"""Prints our requirements at their lower bounds, for pip; not torch's, which `tools/matrix.py` tries."""

import re
import tomllib
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

for requirement in PROJECT["dependencies"]:
    name, bound = re.match(r"([\w-]+)>=([\d.]+)", requirement).groups()  # type: ignore[union-attr]
    if name != "torch":
        print(f"{name}=={bound}.*")
