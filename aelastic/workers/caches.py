"""A folder on this node for code that workers compile: kernels, graphs, extensions, byte code.

A cache is code that the next job runs.  So the folder must belong to the user alone, and its content is separated by
what it was compiled with and for.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from aelastic.base.host.files import text_of
from aelastic.base.loop.threads import in_thread
from aelastic.errors import HostError, InputError

# Read by torch.compile, Triton, the CUDA driver and torch.utils.cpp_extension, in this order.
FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "TORCH_EXTENSIONS_DIR": "extensions",
}
# Python's.  It replaces the byte code beside the modules, so it is only for installations without any.
BYTE_CODE = "PYTHONPYCACHEPREFIX"
OPEN_TIMEOUT_S = 60.0
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")


class CacheFolder:
    """The part of a cache folder that fits this machine.  Held open while it is in use.

    Its disk may be slow, and another agent may hold its lock for a moment: use `open_cache` in an event loop.

    Args:
        folder: the user's choice; created if it does not exist.

    Raises:
        InputError: it cannot be created, or others may write to it.
    """

    def __init__(self, folder: Path) -> None:
        folder = folder.absolute()
        try:
            for made in reversed((folder, *folder.parents)):  # parents as well, whatever the umask is
                made.mkdir(mode=0o700, exist_ok=True)
            folder = folder.resolve()  # a link in the path may be another user's, and lead elsewhere later
            _check_parents(folder)
            self.folder = folder / key()
            self._folders = FOLDERS if has_byte_code() else {**FOLDERS, BYTE_CODE: "pycache"}
            for made in (folder, self.folder, *(self.folder / name for name in self._folders.values())):
                made.mkdir(mode=0o700, exist_ok=True)
                _check_owner(made)
            lock = os.open(self.folder / ".in-use", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock = os.fdopen(lock, "r+b")  # closes itself if the thread's caller has given up
        except OSError as error:
            raise InputError(
                f"cache_dir {folder}: {error.strerror or error}: name a folder that you may write to",
                topic="the-cache-folder-is-not-safe",
            ) from None
        self._remove_stale_locks()
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def env(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables that lead workers here, without those that are set already."""
        return {name: str(self.folder / sub) for name, sub in self._folders.items() if not base.get(name)}

    def _remove_stale_locks(self) -> None:
        """Removes locks of extension builds that were killed: the next build would wait for them forever."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return  # another agent's workers may be building
        for lock in (self.folder / "extensions").glob("**/lock"):
            with suppress(OSError):
                lock.unlink()

    def close(self) -> None:
        """Releases the folder; its content stays."""
        self._lock.close()


async def open_cache(folder: Path) -> CacheFolder:
    """Opens a cache folder without blocking the loop.

    Raises:
        InputError: it cannot be created, or others may write to it.
        HostError: its disk does not answer.
    """
    try:
        return await in_thread(partial(CacheFolder, folder), within_s=OPEN_TIMEOUT_S)
    except TimeoutError:
        raise HostError.no_answer_from_disk(f"cache_dir {folder}", within_s=OPEN_TIMEOUT_S) from None


def _check_parents(folder: Path) -> None:
    """Rejects a path in which others can rename a folder, and so replace it by theirs: sshd's rule for its files.

    In a sticky folder such as /tmp, only the owners of an entry and of the folder can rename the entry (`unlink(2)`).
    """
    for parent in folder.parents:
        found, why = parent.stat(), ""
        if found.st_uid not in {0, os.geteuid()}:
            why = f"which belongs to user {found.st_uid}"
        elif found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX:
            why = f"which others can write to (fix: chmod go-w {parent})"
        if why:
            raise InputError(
                f"cache_dir {folder} lies in {parent}, {why}, so others can replace it: a cache is code that your "
                "workers run; name another folder",
                topic="the-cache-folder-is-not-safe",
            )


def _check_owner(folder: Path) -> None:
    found = folder.stat()
    if found.st_uid != os.geteuid():
        raise InputError(
            f"cache_dir {folder} belongs to user {found.st_uid}: a cache is code that your workers run; "
            "name a folder of your own",
            topic="the-cache-folder-is-not-safe",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(
            f"cache_dir {folder} can be written by others: a cache is code that your workers run; "
            "name a folder that only you can write to",
            topic="the-cache-folder-is-not-safe",
        )


def has_byte_code() -> bool:
    """Whether the installed torch has byte code beside its modules, as pip compiles it; imports none of them."""
    from importlib import metadata

    try:
        folder = Path(str(metadata.distribution("torch").locate_file("torch")))
    except metadata.PackageNotFoundError:
        return True  # nothing to cache
    return (folder / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc").exists()


def key() -> str:
    """Returns a key for everything that compiled code depends on: torch, Python, CPU, driver and GPUs."""
    from importlib import metadata

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    # Name and features of the first CPU: code for one may not run on another.
    lines = text_of("/proc/cpuinfo").partition("\n\n")[0].splitlines()
    cpu = "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
    found = [text_of(path).splitlines() for path in Path("/proc/driver/nvidia/gpus").glob("*/information")]
    gpus = sorted({line for lines in found for line in lines if line.startswith("Model")})
    parts = [torch, sys.implementation.cache_tag or "", platform.machine(), cpu, *_driver(), *gpus]
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return f"torch-{torch}-{sys.implementation.cache_tag}-{digest}"


def _driver() -> list[str]:
    return [text_of(path).partition("\n")[0] for path in _DRIVERS]
