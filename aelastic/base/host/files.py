"""Files: writes those that readers see whole or not at all, to be renamed into place; and reads short ones."""

# No pathlib: failing workers import this.

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import IO


def replace_file(path: str, content: bytes) -> None:
    """Writes a file that readers see whole or not at all, if that is possible."""
    try:
        is_special = not stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        is_special = False
    if is_special:
        # A link, a FIFO, /dev/stderr: a rename would replace it by a file.
        _write(path, content, os.O_TRUNC | os.O_NONBLOCK)
        return
    try:
        write_beside(path, content)
    except OSError as error:
        # A mounted file (Kubernetes' termination log) is busy, and a folder may deny renames: write to the file itself.
        if error.errno not in {errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS} or not os.path.exists(path):
            raise
        _write(path, content, os.O_TRUNC)


def write_beside(path: str, content: bytes) -> None:
    """Replaces a file by a new one; if that fails nothing is left beside it."""
    folder, name = os.path.split(path)
    part = os.path.join(folder, f".{name}.{os.urandom(4).hex()}")
    try:
        _write(part, content, os.O_CREAT | os.O_EXCL)
        os.replace(part, path)
    except BaseException:
        if os.path.lexists(part):
            os.unlink(part)
        raise


def _write(path: str, content: bytes, flags: int) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CLOEXEC | flags, 0o644), "wb") as file:
        file.write(content)


def text_of(path: str | os.PathLike[str]) -> str:
    """Returns the text of a file, mostly one of the kernel's; "" if it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def opened_to_append(path: str | os.PathLike[str] | None) -> AbstractContextManager[IO[bytes] | None]:
    """Opens a file for a worker's stream, which its children share: writes must not overlap.  `None` stays `None`."""
    from contextlib import nullcontext

    return nullcontext() if path is None else open(path, "ab", buffering=0)
