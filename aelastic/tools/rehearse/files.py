"""Files that a script leaves: each rehearsal begins without those of the one before."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from aelastic.errors import InputError

FILES_MAX, DEPTH_MAX = 20_000, 6
GROWN = 3  # a file that grew at this many steps, far apart, and was never rewritten, is a log
END_BYTES = 64  # that identify a file that has grown
# For rehearsals: in the folder that a script is rehearsed in, or next to that of its checkpoints.
FOLDER = "aelastic_rehearsals"
_NO_STATE = {"__pycache__", "node_modules", "site-packages", FOLDER}
_ENVIRONMENT = {"pyvenv.cfg", "conda-meta"}  # a folder with one of these is an environment of Python or conda
RESULT = "rehearsal.json"  # in a folder of rehearsals, and nowhere else
_CHECKPOINT = re.compile(r"\.(pt|pth|ckpt|safetensors|distcp)$")


class Stamp(NamedTuple):
    changed_ns: int
    size: int
    inode: int
    end: bytes  # the last few bytes


class Change(NamedTuple):
    step: int  # after which it was seen
    path: Path
    grew: bool  # and still has its old contents


class Files:
    """The files of a script.

    Args:
        root: their folder.
        apart: a folder for the files of rehearsals.

    Raises:
        InputError: there are too many to check repeatedly, or some that the script would take for its own.
    """

    def __init__(self, root: Path, apart: Path) -> None:
        self.root, self.apart = root, apart
        self.logs: set[str] = set()  # kinds of files that are not checkpoints
        self._hides = root == Path.cwd()
        self._seen: dict[Path, Stamp | None] = {}
        self.before = self.stamps()
        has = [f"{FILES_MAX:,} files or more"] * (len(self.before) >= FILES_MAX)
        has += sorted(str(path.relative_to(root)) for path in self.before if _CHECKPOINT.search(path.name))
        if has:
            raise InputError(
                f"rehearse: {root} has {has[0]}: name an empty folder that the script saves to with --checkpoints DIR"
            )

    def stamps(self) -> dict[Path, Stamp | None]:
        """Returns all entries, folders (`None`) before their contents; no hidden ones in the folder of the job."""
        found: dict[Path, Stamp | None] = {}
        for here, below, names in os.walk(self.root):
            folder = Path(here)
            is_environment = folder != self.root and not _ENVIRONMENT.isdisjoint([*names, *below])
            if RESULT in names or is_environment:
                below.clear()
                continue
            hides = self._hides and folder == self.root
            below[:] = [
                each for each in below
                if each not in _NO_STATE and folder / each != self.apart and not (hides and each.startswith("."))
            ]  # fmt: skip
            found |= dict.fromkeys(folder / each for each in below)
            for path in (folder / each for each in names if not (hides and each.startswith("."))):
                with suppress(OSError):  # it was renamed meanwhile
                    now, known = path.lstat(), self._seen.get(path)
                    stamp = Stamp(now.st_mtime_ns, now.st_size, now.st_ino, known.end if known else b"")
                    found[path] = stamp if stamp == known else stamp._replace(end=_bytes_to(path, stamp.size))
            if len(folder.relative_to(self.root).parts) >= DEPTH_MAX:
                below.clear()
            if len(found) >= FILES_MAX:
                break
        self._seen = found
        return found

    def put_away(self, to: Path) -> None:
        """Moves new entries: files, and folders with their contents."""
        for path in self.stamps():
            if path not in self.before and (path.parent == self.root or path.parent in self.before):
                goal = to / path.relative_to(self.root)
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, goal)

    def opened(self, pid: int) -> set[Path]:
        """Returns the files that a process has open for writing, but not for appending, as with a log."""
        found = set()
        with suppress(OSError):  # it is gone
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # it has closed that one
                    path = Path(os.readlink(f"/proc/{pid}/fd/{fd}"))
                    if path.is_relative_to(self.root) and not path.is_relative_to(self.apart):
                        flags = int(Path(f"/proc/{pid}/fdinfo/{fd}").read_text().partition("flags:")[2].split()[0], 8)
                        is_written = flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_APPEND
                        if is_written and kind_of(path) not in self.logs:
                            found.add(path)
        return found


def changes(before: Mapping[Path, Stamp | None], now: Mapping[Path, Stamp | None], step: int = 0) -> list[Change]:
    """Returns files that are new or have changed."""
    found = []
    for path, stamp in now.items():
        old = before.get(path)
        if stamp is not None and stamp != old:
            grew = old is not None and stamp.inode == old.inode and stamp.size > old.size
            grew = grew and old is not None and old.end == _bytes_to(path, old.size)
            found.append(Change(step, path, grew))
    return found


def overwritten(before: Mapping[Path, Stamp | None], now: Mapping[Path, Stamp | None]) -> list[str]:
    """Returns the names of files that existed before and now have other contents."""
    return sorted(each.path.name for each in changes(before, now) if each.path in before and not each.grew)


def by_kind(seen: list[Change], steps: int, looks: int) -> dict[str, list[int]]:
    """Returns steps after which files had changed, by their names without numbers; only those of checkpoints.

    Files that only grow over this many steps are logs; one that is written at each step, while others are written now
    and then, records the script's progress.

    Args:
        seen: the changes in a run.
        steps: how many it made.
        looks: after how many of them files were checked.
    """
    paths, kinds = dict[Path, list[Change]](), dict[str, set[int]]()
    for change in seen:
        paths.setdefault(change.path, []).append(change)
        kinds.setdefault(kind_of(change.path), set()).add(change.step)
    for path, each in paths.items():
        grew = sorted({change.step for change in each if change.grew})
        is_anew = sum(not change.grew for change in each) > 1
        if len(grew) >= GROWN and grew[-1] - grew[0] >= steps // 2 and not is_anew:
            kinds.pop(kind_of(path), None)
    found = {kind: sorted(at) for kind, at in kinds.items()}
    now_and_then = {kind: at for kind, at in found.items() if 5 * len(at) <= 4 * looks}
    return now_and_then if any(len(at) > 1 for at in now_and_then.values()) else found


def kind_of(path: Path) -> str:
    return re.sub(r"\d+", "0", path.name)


def _bytes_to(path: Path, end: int) -> bytes:
    """Returns the last few bytes of a file up to its earlier length."""
    with suppress(OSError), path.open("rb") as file:
        file.seek(max(0, end - END_BYTES))
        return file.read(min(end, END_BYTES))
    return b""
