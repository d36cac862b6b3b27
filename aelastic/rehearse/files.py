"""Files that a script leaves: each rehearsal begins without those of the one before."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

FILES_MAX, DEPTH_MAX = 20_000, 6
_NO_STATE = {"__pycache__", "node_modules"}


class Stamp(NamedTuple):
    changed_ns: int
    size: int


def stamps_of(root: Path, apart: Path) -> dict[Path, Stamp]:
    """When each file below a folder was changed, but for hidden ones, and those in another folder."""
    found: dict[Path, Stamp] = {}
    for path in _walk(root, apart):
        try:
            seen = path.stat()
        except OSError:
            continue  # it was renamed meanwhile
        found[path] = Stamp(seen.st_mtime_ns, seen.st_size)
        if len(found) >= FILES_MAX:
            break
    return found


def _walk(root: Path, apart: Path) -> Iterator[Path]:
    for here, below, files in os.walk(root):
        folder = Path(here)
        depth = len(folder.relative_to(root).parts)
        below[:] = [
            each for each in below if depth < DEPTH_MAX and each not in _NO_STATE
            and not each.startswith(".") and folder / each != apart
        ]  # fmt: skip
        yield from (folder / each for each in files if not each.startswith("."))


def changed_in(before: Mapping[Path, Stamp], now: Mapping[Path, Stamp]) -> set[Path]:
    """Files that were there, and have other contents now."""
    return {path for path, stamp in now.items() if path in before and before[path] != stamp}


def put_away(before: Mapping[Path, Stamp], root: Path, apart: Path, to: Path) -> None:
    """Moves files that were not there before; folders that are empty then go."""
    for path in stamps_of(root, apart).keys() - before.keys():
        goal = to / path.relative_to(root)
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path, goal)
        for folder in path.parents:
            if folder == root or root not in folder.parents or any(folder.iterdir()):
                break
            folder.rmdir()


def open_for_writing(pid: int, root: Path, apart: Path) -> set[Path]:
    """Files below a folder that a process has open for writing, but for those in another folder."""
    found, inside = set(), f"{root}/"
    with suppress(OSError):  # it is gone
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # it has closed that one
                path = os.readlink(f"/proc/{pid}/fd/{fd}")
                if path.startswith(inside) and not path.startswith(f"{apart}/"):
                    info = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
                    if int(info.partition("flags:")[2].split()[0], 8) & os.O_ACCMODE != os.O_RDONLY:
                        found.add(Path(path))
    return found
