"""Finds event logs in folders, and reads them, also while agents write them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, TypeAlias

from aelastic.base.host.proc_table import stat_fields
from aelastic.errors import InputError
from aelastic.tools.timeline.reader import LINE_BYTES_MAX, Log, UnknownVersionError, read_logs
from aelastic.tools.timeline.text import counted

Show: TypeAlias = Callable[[str], None]
Watch: TypeAlias = Callable[[Iterable[bytes]], Iterator[bytes]]

FILE_NAME = "events.jsonl"  # of `observe.event_log`, which needs an event loop
# Levels of folders below the one given: of a node, of a run, and one more.
DEPTH_MAX = 3
# Lines between two looks at how much has been read.
LINES_EACH = 1000
# A process that began this much later than a log is another one: the boot time is known to the second.
_SAME_PROCESS_S = 2.0


def sources_of(folder: Path) -> Iterator[Path]:
    """Yields the event logs in a folder.

    Raises:
        InputError: it has none.
    """
    if folder.is_file():
        yield folder.resolve()
        return
    if not folder.exists():
        raise InputError(f"{folder}: no such file or folder")
    if not folder.is_dir():
        raise InputError(f"{folder} is neither a folder nor an event log")
    try:
        os.listdir(folder)
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}") from None
    found, root = False, folder.resolve()
    for here, below, files in os.walk(root):  # does not follow `latest`, which is a link to one of the others
        depth = len(Path(here).relative_to(root).parts)
        # Those hold the workers' output, in a folder each.
        below[:] = sorted(name for name in below if depth < DEPTH_MAX and not name.startswith("attempt_"))
        if FILE_NAME in files and os.path.isfile(os.path.join(here, FILE_NAME)):
            found = True
            yield Path(here, FILE_NAME)
    if not found:
        raise InputError(
            f"{folder}: no event log here ({FILE_NAME}, up to {DEPTH_MAX} folders deep); "
            "agents write one into --log-dir"
        )


def read_all(paths: Iterable[Path], show: Show | None = None) -> list[Log]:
    """Returns the logs in files and folders; a file that is named twice is read once.

    Args:
        show: called now and then with a line about the progress.

    Raises:
        InputError: one cannot be read, is of another version, or has no log in it.
    """
    sources = [*dict.fromkeys(source for path in paths for source in sources_of(path))]
    watch: Watch = iter if show is None else _Reading(sources, show).lines
    return [log for source in sources for log in read_file(source, watch)]


class _Reading:
    """Reports how much of all files has been read, while their lines go through `lines`."""

    def __init__(self, sources: Sequence[Path], show: Show) -> None:
        self._show, self._read = show, 0
        self._size = max(1, sum(_size_of(source) for source in sources))
        self._of = counted(len(sources), "event log")

    def lines(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        for number, line in enumerate(lines):
            if number % LINES_EACH == 0:
                share = min(100, 100 * self._read // self._size)
                self._show(f"reading {self._of}: {share} % of {self._size / 1e6:.1f} MB")
            self._read += len(line)
            yield line


def _size_of(source: Path) -> int:
    with suppress(OSError):  # it is gone, which reading it reports
        return source.stat().st_size
    return 0


def read_file(source: Path, watch: Watch = iter) -> list[Log]:
    """Returns the logs in a file.

    Args:
        watch: all lines go through it.

    Raises:
        InputError: it cannot be read, or is of another version.
    """
    try:
        with open(source, "rb") as file:
            logs = read_logs(str(source), watch(_lines(file)))
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror}") from None
    except UnknownVersionError as error:
        raise InputError(str(error)) from None
    for log in logs:
        if log.entries and not log.is_ended and log.host == socket.gethostname():
            if _is_alive(log.pid, log.first_wall):
                log.alive_at = datetime.now(UTC).timestamp()
            else:
                log.is_dead = True
    return logs


def _lines(file: BinaryIO) -> Iterator[bytes]:
    """Yields the lines; one that is too long is cut just above the limit."""
    while line := file.readline(LINE_BYTES_MAX + 1):
        rest = line
        while not rest.endswith(b"\n") and len(rest) > LINE_BYTES_MAX:
            rest = file.readline(LINE_BYTES_MAX + 1)
        yield line if rest is line else line + b"\n"


def _is_alive(pid: int, since: float) -> bool:
    """Whether the process with this pid is alive and began by then: pids are reused."""
    fields = stat_fields(pid)
    if fields is None:
        return False
    boot = next(line for line in Path("/proc/stat").read_text().splitlines() if line.startswith("btime "))
    began = int(boot.split()[1]) + int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5)
    return began < since + _SAME_PROCESS_S
