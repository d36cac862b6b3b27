"""What `make coverage` prints: covered lines by folder, and of the cores; fails where a core is below the floor.

python tests/kit/coverage_by_folder.py
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path

import coverage

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

from core.test_layers import CORES  # noqa: E402  the list of them

FLOOR = 95.0  # percent of the lines of all cores


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> int:
    data = coverage.Coverage(config_file=str(ROOT / "pyproject.toml"))
    data.load()
    if not data.get_data().measured_files():
        say("no coverage was measured: run the tests with --cov first, as `make coverage` does")
        return 2
    folders: defaultdict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for path in sorted((ROOT / "aelastic").rglob("*.py")):
        _, lines, _, missing, _ = data.analysis2(str(path))
        module = ".".join(path.relative_to(ROOT / "aelastic").with_suffix("").parts).removesuffix(".__init__")
        folders[str(path.parent.relative_to(ROOT))].append((module, len(lines), len(missing)))
    for folder, modules in folders.items():
        say(_line(folder, modules))
    modules = [module for each in folders.values() for module in each]
    cores = [module for module in modules if f"{module[0]}.".startswith(tuple(f"{core}." for core in CORES))]
    say("\nThe cores, those below the floor first:")
    for core in sorted(cores, key=_percent):
        say(_line(core[0], [core]))
    say(_line("all cores", cores))
    return int(_percent(_sum(cores)) < FLOOR)


def _sum(modules: list[tuple[str, int, int]]) -> tuple[str, int, int]:
    return "", sum(lines for _, lines, _ in modules), sum(missing for *_, missing in modules)


def _percent(module: tuple[str, int, int]) -> float:
    _, lines, missing = module
    return 100.0 * (lines - missing) / lines if lines else 100.0


def _line(name: str, modules: list[tuple[str, int, int]]) -> str:
    whole = _sum(modules)
    return f"{name:<32}{whole[1]:>6} lines {_percent(whole):>6.1f} %"


if __name__ == "__main__":
    sys.exit(main())
