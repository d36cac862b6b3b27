"""Files: those that readers see whole or not at all, written beside, then renamed; and what short ones say."""

# No pathlib: workers that fail import this.

from __future__ import annotations

import errno
import os
import stat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from typing import IO


def replace_file(path: str, content: bytes) -> None:
    """Writes a file that readers see whole or not at all, where there is a choice."""
    try:
        is_special = not stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        is_special = False
    if is_special:
        # A link, a FIFO, /dev/stderr: a rename would put a file in its place.
        _write(path, content, os.O_TRUNC | os.O_NONBLOCK)
        return
    try:
        write_beside(path, content)
    except OSError as error:
        # A file that is mounted (Kubernetes' termination log) is busy, one in a closed folder denies: write in place.
        if error.errno not in {errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS} or not os.path.exists(path):
            raise
        _write(path, content, os.O_TRUNC)


def write_beside(path: str, content: bytes) -> None:
    """Puts a new file in the place of what is there; where that fails nothing is left beside it."""
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
    """What a file says, of those that the kernel shows mostly; "" where it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def opened_to_append(path: str | os.PathLike[str] | None) -> AbstractContextManager[IO[bytes] | None]:
    """A file for a worker's stream, whose children share it: no write may land on another's; `None` stays `None`."""
    from contextlib import nullcontext

    return nullcontext() if path is None else open(path, "ab", buffering=0)
