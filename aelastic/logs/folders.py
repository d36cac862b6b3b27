"""Folders and files for the output of workers: whether they can be made, and the link to the newest run."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aelastic.errors import InputError
from aelastic.logs_specs import INHERITED

DROPPED = Path(os.devnull)


def temporary_folder(otherwise: Path | None) -> Path:
    """The folder for scratch: the system's, else the one given.

    Raises:
        InputError: there is neither.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # in a container whose root is read-only, for example
        if otherwise is None:
            raise InputError("no temporary folder is writable: set TMPDIR to one that is, or use --log-dir") from None
        return Path(os.path.abspath(otherwise))


def touched(path: str) -> Path | None:
    """A file that exists from now on; `None` for the agent's own stream."""
    if path == INHERITED:
        return None
    absolute = Path(os.path.abspath(path))
    if absolute.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(absolute))
    if absolute != DROPPED:
        absolute.touch()
    return absolute


def link_latest(root: Path) -> None:
    """Makes `latest` beside the folder of the run lead to it: the old link, or the new one, at any time."""
    new = root.with_name(f".{root.name}.latest")
    try:
        new.symlink_to(root.name)
    except OSError:
        return  # a file system without links
    try:
        new.replace(root.with_name("latest"))
    except OSError:  # there is a folder of that name
        with suppress(OSError):
            new.unlink()


@contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Turns an `OSError` into an `InputError` that says which folder cannot be written, and what to do."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what} cannot be written ({error.strerror}): {remedy}") from None
