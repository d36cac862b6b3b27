"""What workers write: where it goes, and how it reaches the console.

A stream that is kept goes straight into a file: the worker writes it, whatever becomes of the agent, and is
never blocked by a slow console.  What the console shows as well is read from that file as it grows.
The file is the buffer: memory stays bounded, and what a stalled console has not shown is not lost.

stderr goes through a file even when nobody asked for one, because its end tells why a worker died.
Such a file is scratch: what has been shown is given back to the file system, but for the end.

Layout, as torchrun's: `<log_dir>/<run_id>_<random>/attempt_<n>/<local_rank>/{stdout.log,stderr.log,error.json}`.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import anyio
import anyio.to_thread

from aelastic import guard
from aelastic.errors import HostError, InputError
from aelastic.inotify import LOST, Growth
from aelastic.spec import Std, WorkerSpec, streams_of

_log = logging.getLogger(__name__)

# Read and shown at once; large enough that a system call costs little per byte.
CHUNK_BYTES = 1 << 18
# So much of one worker's output is shown before another's turn comes.
CHUNKS_PER_TURN = 4
# A console that can't be written to just now is tried again.
RETRY_S = 0.05
# A line longer than this is shown in pieces; it is whole in the file.
LINE_BYTES_MAX = 1 << 16
# Of a worker's stderr, what is searched for the cause of its death.
TAIL_BYTES = 1 << 16
# Scratch that has been shown is given back in steps of this size.
PUNCH_BYTES = 1 << 20
# At the end, a console that takes nothing for this long is given up; the files are kept then.
STALL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """Where one worker's output goes in one attempt; `None` is the agent's own stream."""

    stdout: Path | None
    stderr: Path
    error_file: Path


class RunLogs:
    """The files of one run, and what of them is shown on the console.

    Nothing is made before `open`: whoever cleans up after us can be told where to look first.
    """

    def __init__(self, spec: WorkerSpec, run_id: str) -> None:
        self._spec = spec
        temporary, mine = _temporary_folder(spec.log_dir), os.urandom(4).hex()
        # Removed at the end: what nobody asked for.
        self.scratch = temporary / f"aelastic_{mine}"
        self._is_asked = any(
            streams_of(streams, rank) for streams in (spec.redirects, spec.tee) for rank in range(spec.local_world_size)
        )
        kept = temporary / f"aelastic_logs_{mine}" if self._is_asked else self.scratch
        name = re.sub(r"[^\w.-]", "_", run_id)
        self.root = Path(os.path.abspath(spec.log_dir or kept), f"{name}_{mine}")
        self._growth = Growth()
        self._waiting = anyio.CancelScope()  # for growth
        self._consoles = {Std.OUT: _Console(_fd_of(sys.stdout, 1)), Std.ERR: _Console(_fd_of(sys.stderr, 2))}
        self._files: dict[int, WorkerFiles] = {}

    def open(self) -> None:
        """Makes the folder of the run.

        Raises:
            InputError: it can't be written.
        """
        with _refusing(f"temporary folder {self.scratch.parent}", "set TMPDIR to another"):
            self.scratch.mkdir(mode=0o700, parents=True)
        with _refusing(f"log folder {self.root.parent}", "choose another with --log-dir"):
            self.root.mkdir(parents=True)
        if self._is_asked and self._spec.log_dir is None:
            _log.warning("the workers' output is kept in %s; choose another folder with --log-dir", self.root)

    @property
    def mark(self) -> str:
        """What the environment of every worker of this run holds, and no other process's."""
        return f"TORCHELASTIC_ERROR_FILE={self.root}/"

    def open_attempt(self, attempt: int) -> dict[int, WorkerFiles]:
        """Makes the files of the next generation, by local rank, and follows those that are shown."""
        try:
            self._files = {rank: self._open(attempt, rank) for rank in range(self._spec.local_world_size)}
        except OSError as error:
            raise HostError(f"the workers' log files can't be made in {self.root}: {error.strerror}") from None
        return self._files

    def trouble(self) -> str:
        """A sentence where a disk that workers write to is full; else ""."""
        for folder in (self.scratch, self.root):
            try:
                if os.statvfs(folder).f_bavail == 0:
                    return f"the disk that holds {folder} is full"
            except OSError:
                pass  # gone: then it is not what is full
        return ""

    def _open(self, attempt: int, rank: int) -> WorkerFiles:
        folder = self.root / f"attempt_{attempt}" / str(rank)
        folder.mkdir(parents=True)
        teed, kept = streams_of(self._spec.tee, rank), streams_of(self._spec.redirects, rank)
        stdout = folder / "stdout.log" if Std.OUT in teed | kept else None
        stderr = folder / "stderr.log"
        prefix = f"[{self._spec.role}{rank}]:".encode()
        if stdout is not None and Std.OUT in teed:
            self._follow(stdout, Std.OUT, prefix)
        if Std.ERR in teed:
            self._follow(stderr, Std.ERR, prefix)
        elif Std.ERR not in kept:
            stderr = self.scratch / f"stderr_{attempt}_{rank}.log"
            self._follow(stderr, Std.ERR, b"", scratch=True)
        return WorkerFiles(stdout, stderr, folder / "error.json")

    def _follow(self, path: Path, stream: Std, prefix: bytes, *, scratch: bool = False) -> None:
        path.touch()
        follower = _Follower(path, prefix, self._growth.watch(path), scratch=scratch)
        self._consoles[stream].add(follower)
        if follower.watch is None:
            self._waiting.cancel()  # the kernel will not tell of this one: look at intervals from now on

    def tail(self, local_rank: int) -> str:
        """The end of what a worker of this generation wrote to stderr; "" if it can't be read.  May block."""
        try:
            with self._files[local_rank].stderr.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                return file.read(TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def end_attempt(self) -> None:
        """Nobody writes any more: what is left in the files is shown, then they are let go."""
        for console in self._consoles.values():
            console.end_followers()

    async def run(self) -> None:
        """Shows what is followed, as it is written.  Runs until cancelled."""
        async with anyio.create_task_group() as tasks:
            for stream, console in self._consoles.items():
                tasks.start_soon(console.run, self._growth.forget, name=f"console {stream.name}")
            while True:
                blind = any(console.is_blind for console in self._consoles.values())
                grown: set[int] = set()
                with anyio.CancelScope() as self._waiting:
                    grown = await self._growth.wait(blind=blind)
                for console in self._consoles.values():
                    console.wake(grown)

    async def finish(self) -> None:
        """Returns when the console has taken everything, or takes no more."""
        self.end_attempt()
        async with anyio.create_task_group() as tasks:
            for console in self._consoles.values():
                tasks.start_soon(console.drain)
        if any(console.is_stalled for console in self._consoles.values()):
            self._keep_scratch()

    def _keep_scratch(self) -> None:
        kept = self.scratch.with_name(f"{self.scratch.name}_kept")  # out of reach of those who remove the scratch
        try:
            self.scratch.rename(kept)
        except OSError:
            kept = self.scratch  # somebody was there before us
        places = [kept] if self.scratch in self.root.parents else [kept, self.root]
        _log.warning("the console takes no more output: what it has not shown is in %s", " and ".join(map(str, places)))

    def give_up(self) -> None:
        """Ends `finish` now, whatever the console has taken."""
        for console in self._consoles.values():
            console.give_up()

    def close(self) -> None:
        """Closes what is open and removes the scratch."""
        for console in self._consoles.values():
            console.close()
        self._growth.close()
        guard.remove(str(self.scratch))


def _temporary_folder(otherwise: Path | None) -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # a container whose root is read-only, say
        if otherwise is None:
            raise InputError("no temporary folder can be written: set TMPDIR to one, or use --log-dir") from None
        return Path(os.path.abspath(otherwise))


@contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{what} can't be written ({error.strerror}): {remedy}") from None


class _Follower:
    """Reads a file from where it was left, in pieces fit for the console."""

    def __init__(self, path: Path, prefix: bytes, watch: int | None, *, scratch: bool) -> None:
        self.watch = watch
        self.is_ended = False  # nobody writes any more
        self._path = path
        self._fd = os.open(path, os.O_RDWR if scratch else os.O_RDONLY)
        self._prefix = prefix
        self._scratch = scratch
        self._read = self._punched = 0  # bytes
        self._partial = b""  # a line that has begun
        self._is_inside = False  # of a line whose beginning has been shown already

    def next_piece(self) -> bytes | None:
        """The next of what has been written; `None` when there is no more for now."""
        if chunk := os.pread(self._fd, CHUNK_BYTES, self._read):
            self._read += len(chunk)
            self._punch()
            return self._shown(chunk)
        if self.is_ended and self._partial:
            rest, self._partial = self._prefixed(self._partial + b"\n"), b""
            return rest
        return None

    def _shown(self, chunk: bytes) -> bytes:
        if not self._prefix:
            return chunk  # as the worker would have written it itself
        whole, newline, self._partial = (self._partial + chunk).rpartition(b"\n")
        piece = self._prefixed(whole + newline) if newline else b""
        if len(self._partial) > LINE_BYTES_MAX:
            piece += self._prefixed(self._partial)
            self._partial, self._is_inside = b"", True
        return piece

    def _prefixed(self, lines: bytes) -> bytes:
        beginning = b"" if self._is_inside else self._prefix
        self._is_inside = False
        ending = lines.endswith(b"\n")
        body = lines[:-1] if ending else lines
        return beginning + body.replace(b"\n", b"\n" + self._prefix) + (b"\n" if ending else b"")

    def _punch(self) -> None:
        """Gives back what has been shown, but for the end, which may tell the cause of a failure."""
        end = self._read - TAIL_BYTES
        if self._scratch and end - self._punched >= PUNCH_BYTES and _fallocate is not None:
            _fallocate(self._fd, _PUNCH_HOLE | _KEEP_SIZE, self._punched, end - self._punched)
            self._punched = end

    def close(self) -> None:
        os.close(self._fd)
        if self._scratch and self.is_ended:
            self._path.unlink(missing_ok=True)


class _Console:
    """One of the agent's own streams, and the files whose growth it shows."""

    def __init__(self, fd: int | None) -> None:
        self.is_stalled = False
        self._fd = fd  # None once nobody reads it
        self._followers: list[_Follower] = []
        self._grown = anyio.Event()
        self._progress = anyio.Event()
        self._everything = False  # any file may have grown
        self._watches: set[int] = set()

    @property
    def is_blind(self) -> bool:
        """Whether the kernel does not tell of every file's growth."""
        return any(follower.watch is None for follower in self._followers)

    @property
    def is_idle(self) -> bool:
        return not self._followers

    def add(self, follower: _Follower) -> None:
        self._followers.append(follower)

    def end_followers(self) -> None:
        for follower in self._followers:
            follower.is_ended = True
        self._everything = True
        self._grown.set()

    def wake(self, watches: set[int]) -> None:
        self._watches |= watches
        self._everything |= self.is_blind or LOST in watches
        self._grown.set()

    def give_up(self) -> None:
        self.is_stalled = True
        self._progress.set()

    async def drain(self) -> None:
        """Returns when everything has been shown, or nothing was taken for a while."""
        while not self.is_idle and not self.is_stalled:
            self._progress = anyio.Event()
            with anyio.move_on_after(STALL_TIMEOUT_S) as waited:
                await self._progress.wait()
            self.is_stalled |= waited.cancelled_caught

    async def run(self, forget: Callable[[int], None]) -> None:
        unfinished: list[_Follower] = []
        while True:
            await self._grown.wait()
            self._grown = anyio.Event()
            watches, everything = self._watches, self._everything
            self._watches, self._everything = set(), False
            turn = [f for f in self._followers if everything or f.watch in watches or f in unfinished]
            unfinished = []
            for follower in turn:
                was_ended = follower.is_ended
                if not await self._show(follower):
                    unfinished.append(follower)
                    self._grown.set()
                elif was_ended:
                    self._followers.remove(follower)
                    if follower.watch is not None:
                        forget(follower.watch)
                    follower.close()
            self._progress.set()

    async def _show(self, follower: _Follower) -> bool:
        """Shows some of what has been written, and gives whether that was all; then others have their turn."""
        for _ in range(CHUNKS_PER_TURN):
            piece = follower.next_piece()
            if piece is None:
                return True
            if piece and self._fd is not None:
                # In a thread: the console may stall, the loop must not.
                await anyio.to_thread.run_sync(self._write, self._fd, piece, abandon_on_cancel=True)
                self._progress.set()
        return False

    def _write(self, fd: int, piece: bytes) -> None:
        rest = memoryview(piece)
        while rest:
            try:
                rest = rest[os.write(fd, rest) :]
            except BlockingIOError:  # somebody made it non-blocking; it is shared, so we can't undo that
                anyio.from_thread.run(anyio.sleep, RETRY_S)
            except OSError as error:
                if error.errno in {errno.EPIPE, errno.EBADF, errno.EIO}:
                    self._fd = None  # nobody reads it any more; files are still kept
                    return
                anyio.from_thread.run(anyio.sleep, RETRY_S)  # a full disk may have room again; a stall, till then

    def close(self) -> None:
        for follower in self._followers:
            follower.close()


def _fd_of(stream: object, usual: int) -> int | None:
    """The descriptor behind the agent's stream, which a program around us may have replaced; `None` if it is closed."""
    if stream is None:
        return None
    try:
        return stream.fileno()  # type: ignore[attr-defined,no-any-return]
    except (AttributeError, OSError, ValueError):
        return usual


def _find_fallocate() -> Callable[[int, int, int, int], int] | None:
    """fallocate(2): the standard library has no call that gives a part of a file back."""
    try:
        function = ctypes.CDLL(None).fallocate
    except (AttributeError, OSError):
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    return function


_KEEP_SIZE, _PUNCH_HOLE = 0x01, 0x02
_fallocate = _find_fallocate()
