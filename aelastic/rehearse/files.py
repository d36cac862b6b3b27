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
GROWN = 3  # a file that grew at so many steps, far apart, and was never written anew, is a log
_NO_STATE = {"__pycache__", "node_modules"}
RESULT = "rehearsal.json"  # in a folder of rehearsals, and nowhere else
_CHECKPOINT = re.compile(r"\.(pt|pth|ckpt|safetensors|distcp)$")


class Stamp(NamedTuple):
    changed_ns: int
    size: int
    inode: int


class Change(NamedTuple):
    step: int  # after which it was seen
    path: Path
    grew: bool  # and has the contents that it had, too


class Files:
    """Those of a script.

    Args:
        root: the folder that they are in.
        apart: a folder in which rehearsals keep theirs.

    Raises:
        InputError: there are too many to be looked at again and again, or some that the script would take for its own.
    """

    def __init__(self, root: Path, apart: Path) -> None:
        self.root, self.apart, self.logs = root, apart, set[str]()
        self._hides = root == Path.cwd()
        self.before = self.stamps()
        has = [f"{FILES_MAX:,} files or more"] * (len(self.before) >= FILES_MAX)
        has += sorted(str(path.relative_to(root)) for path in self.before if _CHECKPOINT.search(path.name))
        if has:
            raise InputError(
                "rehearse: name the folder that the script saves to, and that is empty: --checkpoints DIR "
                f"({root} has {has[0]})"
            )

    def stamps(self) -> dict[Path, Stamp | None]:
        """What is there, folders (`None`) before what is in them; of the folder that jobs run in, no hidden entries."""
        found: dict[Path, Stamp | None] = {}
        for here, below, names in os.walk(self.root):
            folder = Path(here)
            if RESULT in names:
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
                    seen = path.lstat()
                    found[path] = Stamp(seen.st_mtime_ns, seen.st_size, seen.st_ino)
            if len(folder.relative_to(self.root).parts) >= DEPTH_MAX:
                below.clear()
            if len(found) >= FILES_MAX:
                break
        return found

    def is_log(self, path: Path) -> bool:
        """Whether a file of that name, whatever its numbers are, was a log in the undisturbed run."""
        return _shape(path) in self.logs

    def learn(self, logs: set[Path]) -> None:
        self.logs |= {_shape(path) for path in logs}

    def put_away(self, to: Path) -> None:
        """Moves what was not there before: files, and folders with all that is in them."""
        for path in self.stamps():
            if path not in self.before and (path.parent == self.root or path.parent in self.before):
                goal = to / path.relative_to(self.root)
                goal.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(path, goal)

    def opened(self, pid: int) -> set[Path]:
        """Those that a process has open to write them, and not to add to them, as to a log."""
        found = set()
        with suppress(OSError):  # it is gone
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with suppress(OSError):  # it has closed that one
                    path = Path(os.readlink(f"/proc/{pid}/fd/{fd}"))
                    if path.is_relative_to(self.root) and not path.is_relative_to(self.apart):
                        flags = int(Path(f"/proc/{pid}/fdinfo/{fd}").read_text().partition("flags:")[2].split()[0], 8)
                        if flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_APPEND and not self.is_log(path):
                            found.add(path)
        return found


def changes(before: Mapping[Path, Stamp | None], now: Mapping[Path, Stamp | None], step: int = 0) -> list[Change]:
    """Files that are new, or not what they were."""
    found = []
    for path, stamp in now.items():
        old = before.get(path)
        if stamp is not None and stamp != old:
            grew = old is not None and stamp.inode == old.inode and stamp.size > old.size
            found.append(Change(step, path, grew))
    return found


def overwritten(before: Mapping[Path, Stamp | None], now: Mapping[Path, Stamp | None]) -> list[str]:
    """Names of files that were there, and have other contents now."""
    return sorted(each.path.name for each in changes(before, now) if each.path in before and not each.grew)


def logs_of(seen: list[Change], steps: int) -> set[Path]:
    """Files that only grow, while so many steps go on."""
    grew: dict[Path, set[int]] = {}
    anew = dict[Path, int]()
    for change in seen:
        if change.grew:
            grew.setdefault(change.path, set()).add(change.step)
        else:
            anew[change.path] = anew.get(change.path, 0) + 1
    return {
        path for path, at in grew.items()
        if len(at) >= GROWN and max(at) - min(at) >= steps // 2 and anew.get(path, 0) <= 1
    }  # fmt: skip


def _shape(path: Path) -> str:
    return re.sub(r"\d+", "0", path.name)
