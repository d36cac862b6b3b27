"""Files that a script leaves: each rehearsal begins without those of the one before."""

from __future__ import annotations

import os
import shutil
import stat
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
    """When each file below a folder was changed, but for those in another folder."""
    found: dict[Path, Stamp] = {}
    for path in _walk(root, apart):
        with suppress(OSError):  # it was renamed meanwhile
            seen = path.lstat()
            if not stat.S_ISDIR(seen.st_mode):
                found[path] = Stamp(seen.st_mtime_ns, seen.st_size)
    return found


def entries_of(root: Path, apart: Path) -> set[Path]:
    """Files and folders below a folder, but for another folder."""
    return set(_walk(root, apart))


def _walk(root: Path, apart: Path) -> Iterator[Path]:
    """What is there, folders before what is in them; of the folder that jobs run in, no hidden entries."""
    hides, seen = root == Path.cwd(), 0
    for here, below, files in os.walk(root):
        folder = Path(here)
        is_deep = len(folder.relative_to(root).parts) >= DEPTH_MAX
        below[:] = [
            each for each in below if each not in _NO_STATE and folder / each != apart
            and not (hides and folder == root and each.startswith("."))
        ]  # fmt: skip
        for each in (*below, *files):
            if not (hides and folder == root and each.startswith(".")):
                yield folder / each
        seen += len(files)
        if is_deep:
            below.clear()
        if seen >= FILES_MAX:
            return


def changed_in(before: Mapping[Path, Stamp], now: Mapping[Path, Stamp]) -> set[Path]:
    """Files that were there, and have other contents now."""
    return {path for path, stamp in now.items() if path in before and before[path] != stamp}


def put_away(before: set[Path], root: Path, apart: Path, to: Path) -> None:
    """Moves what was not there before: files, and folders with all that is in them."""
    for path in sorted(entries_of(root, apart) - before):
        if path.parent == root or path.parent in before:
            goal = to / path.relative_to(root)
            goal.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, goal)


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
