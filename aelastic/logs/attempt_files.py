"""Makes and opens the output files of one attempt, and their folders, in a thread, because a disk may hang.

Nothing here is shared with the event loop: the open files are handed over all together, or closed here.
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING

from aelastic.base.record import Record
from aelastic.diagnose.failures.failure import ERROR_FILE_VARIABLE
from aelastic.errors import InputError
from aelastic.logs.follower import Follower
from aelastic.logs.lines import PID, FilteredLines, PrefixedLines, Splitter
from aelastic.logs.pump import DescriptorSink, NullSink, Sink
from aelastic.logs_specs import INHERITED, LogsDest
from aelastic.settings import Std
from aelastic.spec import WorkerSpec

if TYPE_CHECKING:
    from aelastic.logs.expected_output import ExpectedOutputMatcher, ProgressMatcher
    from aelastic.logs.live_lines import LiveLines

DROPPED = Path(os.devnull)


class WorkerFiles(Record):
    """Where one worker's output goes in one attempt; `None`: the agent's own stream."""

    stdout: Path | None
    stderr: Path
    error_file: Path
    return_file: Path  # the return value of a function


class ShownFile:
    """A followed file, and where it is shown.

    Args:
        stream: the console stream that shows it; `None` if none does.
    """

    def __init__(self, follower: Follower, stream: Std | None, sink: Sink) -> None:
        self.follower, self.stream, self.sink = follower, stream, sink
        self.rank = 0  # local
        # Its prefix needs the id of the worker's process.
        self.unnamed: PrefixedLines | FilteredLines | LiveLines | None = None


class AttemptFiles:
    """The open files of one attempt's workers."""

    def __init__(self) -> None:
        self.files: dict[int, WorkerFiles] = {}  # by local rank
        self.shown: list[ShownFile] = []
        self.expected: dict[int, list[tuple[Follower, ExpectedOutputMatcher]]] = {}  # by local rank
        self.progress: dict[int, list[tuple[Follower, ProgressMatcher]]] = {}  # as above

    def close(self) -> None:
        for each in self.shown:
            each.follower.close()
            each.sink.close()


class AttemptOpener:
    """Makes and opens the files of one attempt.

    Args:
        spec: the worker spec, with the log options.
        attempt: counts generations, from 0.
        scratch: the folder for files that are not kept.
        sinks: the sinks of the console.
        ended: the previous attempt's folder, which is removed; `None` if it is kept, or there is none.
    """

    def __init__(
        self, spec: WorkerSpec, attempt: int, scratch: Path, sinks: Mapping[Std, Sink], ended: Path | None
    ) -> None:
        self._spec = spec
        self._attempt = attempt
        self._scratch = scratch
        self._sinks = sinks
        self._ended = ended
        self._opened = AttemptFiles()
        self._lock = threading.Lock()  # of these two
        self._is_abandoned = False
        self._is_over = False

    def open(self, lay_out: Callable[[], LogsDest], envs: Mapping[int, dict[str, str]]) -> AttemptFiles:
        """Opens all files.  May block.

        Args:
            lay_out: makes the folders, and names the files.
            envs: the complete environments of the workers; each gets the path of its error file.

        Raises:
            OSError: a file cannot be made.
            InputError: `lay_out` did not name a file that is needed.
        """
        try:
            if self._ended is not None:
                shutil.rmtree(self._ended, ignore_errors=True)
            dest = lay_out()
            for _, _, path, texts in self._teed(dest):
                if texts:
                    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
            for rank in sorted(envs):
                self._opened.files[rank] = self._open(rank, dest, envs[rank])
        except BaseException:
            self._opened.close()
            raise
        with self._lock:
            self._is_over = True
            if self._is_abandoned:
                self._opened.close()
        return self._opened

    def abandon(self) -> None:
        """Closes the opened files, now or once `open` is done: nothing waits for them any more."""
        with self._lock:
            self._is_abandoned = True
            if self._is_over:
                self._opened.close()

    def _open(self, rank: int, dest: LogsDest, env: dict[str, str]) -> WorkerFiles:
        prefix, name = self._prefix(rank, env), f"{self._attempt}_{rank}"
        stdout = touched(dest.stdouts.get(rank, INHERITED))
        if self._spec.watches_output or (stdout is None and self._sinks[Std.OUT].may_stall):
            stdout = self._in_a_file(stdout, f"stdout_{name}.log", rank, env, Std.OUT)
        # Even if output is dropped, its end is searched for the cause of the worker's death.
        stderr = touched(dest.stderrs.get(rank, INHERITED))
        stderr = self._in_a_file(stderr, f"stderr_{name}.log", rank, env, Std.ERR)
        for stream, teed, filtered, texts in self._teed(dest):
            path = touched(teed.get(rank, INHERITED))
            if path is None or not path.is_file():
                continue  # /dev/null, for example: there is nothing to read
            splitter = self._splitter(prefix, rank, stream)
            shown = self._follow(path, splitter, stream)
            named: list[tuple[PrefixedLines | FilteredLines | LiveLines, ShownFile]] = [(splitter, shown)]
            if texts:
                into, chosen = os.open(filtered, os.O_WRONLY | os.O_APPEND), FilteredLines(prefix, texts)
                named.append((chosen, self._follow(path, chosen, None, DescriptorSink(into, is_ours=True))))
            for unnamed, shown in named if PID in prefix else ():
                shown.rank, shown.unnamed = rank, unnamed
        self._limit(stdout, stderr)  # after the followers that it must wait for
        error_file = env.get(ERROR_FILE_VARIABLE) or dest.error_files.get(rank, "")
        if error_file in {"", os.devnull}:  # not kept, but the agent needs one
            error_file = str(self._scratch / f"error_{name}.json")
        env[ERROR_FILE_VARIABLE] = error_file
        return WorkerFiles(stdout, stderr, Path(error_file), self._scratch / f"return_value_{name}.pickle")

    def _limit(self, *paths: Path | None) -> None:
        """Limits kept files to their ends if `--keep-log-size` is given."""
        for path in dict.fromkeys(path for path in paths if path is not None and path.is_file()):
            if self._spec.log_max_bytes is not None and path.parent != self._scratch:
                from aelastic.logs.expected_output import OutputSearch

                self._follow(path, OutputSearch([]), None, keeps=self._spec.log_max_bytes)

    def _teed(self, dest: LogsDest) -> Sequence[tuple[Std, Mapping[int, str], str, Sequence[str]]]:
        """Returns, by stream, the files that the console also shows, the file for filtered lines, and the filters."""
        found = [
            (Std.OUT, dest.tee_stdouts, dest.filtered_stdout, self._spec.duplicate_stdout_filters),
            (Std.ERR, dest.tee_stderrs, dest.filtered_stderr, self._spec.duplicate_stderr_filters),
        ]
        for (_, _, path, texts), what in zip(found, ("filtered_stdout", "filtered_stderr"), strict=True):
            if texts and not path:
                raise InputError(
                    f"logs_specs: reify returned no {what}, which filters of duplicated lines need",
                    topic="a-logs_specs-object-does-not-work",
                )
        return found

    def _in_a_file(self, path: Path | None, name: str, rank: int, env: Mapping[str, str], stream: Std) -> Path:
        """Returns a stream's file, searched; scratch if not kept, then shown as if the worker wrote to the console."""
        if path is None or path == DROPPED:
            shown_on, path = stream if path is None else None, self._scratch / name
            path.touch()
            self._search(path, rank, env)
            self._follow(path, self._splitter(None, rank, shown_on), shown_on, is_scratch=True)
        else:
            self._search(path, rank, env)
        return path

    def _splitter(self, prefix: bytes | None, rank: int, stream: Std | None) -> PrefixedLines | LiveLines:
        """Returns the splitter for a stream, by where it is shown."""
        if stream is None or not self._sinks[stream].is_live:
            return PrefixedLines(prefix)
        has_others = self._spec.local_world_size > 1
        label = f"[{rank}] ".encode() if has_others else b""
        from aelastic.logs.live_lines import LiveLines

        return LiveLines(prefix, (rank, int(stream)), label, holds_text=has_others)

    def _search(self, path: Path, rank: int, env: Mapping[str, str]) -> None:
        """Has a worker's file searched for expected output and for progress."""
        expected, progress = self._spec.expect_output, self._spec.progress
        is_expected = expected is not None and expected.concerns(env)
        if not (is_expected or progress) or not path.is_file():
            return
        from aelastic.logs.expected_output import ExpectedOutputMatcher, OutputSearch, ProgressMatcher

        matcher = ExpectedOutputMatcher(expected.pattern) if expected is not None and is_expected else None
        steps = ProgressMatcher(progress) if progress else None
        search = OutputSearch([each for each in (matcher, steps) if each is not None])
        follower = self._follow(path, search, None).follower
        if matcher is not None:
            self._opened.expected.setdefault(rank, []).append((follower, matcher))
        if steps is not None:
            self._opened.progress.setdefault(rank, []).append((follower, steps))

    def _prefix(self, rank: int, env: dict[str, str]) -> bytes:
        template = self._spec.log_line_prefix_template or "[${role_name}${local_rank}]:"
        words = {
            "role_name": env["ROLE_NAME"],
            "rank": env["RANK"],
            "local_rank": rank,
            "hostname": os.uname().nodename,  # the short name, as in torchrun: it is on every line
            "pid": PID.decode(),
        }
        return Template(template).safe_substitute(words).encode("utf-8", "surrogateescape")

    def _follow(
        self,
        path: Path,
        splitter: Splitter,
        stream: Std | None,
        sink: Sink | None = None,
        *,
        is_scratch: bool = False,
        keeps: int | None = None,
    ) -> ShownFile:
        sharers = [each.follower for each in self._opened.shown if each.follower.path == path]
        follower = Follower(path, splitter, is_scratch=is_scratch, keeps=keeps, sharers=sharers)
        into = sink or (NullSink() if stream is None else self._sinks[stream])
        shown = ShownFile(follower, stream, into)
        self._opened.shown.append(shown)
        return shown


# On disk.


def temporary_folder(otherwise: Path | None) -> Path:
    """Returns the folder for scratch: the system's, or else the given one.

    Raises:
        InputError: there is neither.
    """
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # in a container whose root is read-only, for example
        if otherwise is None:
            raise InputError(
                "no temporary folder is writable: set TMPDIR to a writable one, or use --log-dir"
            ) from None
        return Path(os.path.abspath(otherwise))


def touched(path: str) -> Path | None:
    """Makes a file if it does not exist; returns its absolute path, or `None` for the agent's own stream."""
    if path == INHERITED:
        return None
    absolute = Path(os.path.abspath(path))
    if absolute.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(absolute))
    if absolute != DROPPED:
        absolute.touch()
    return absolute


def link_latest(root: Path) -> None:
    """Points `latest`, beside the folder of the run, to that folder, atomically."""
    new = root.with_name(f".{root.name}.latest")
    try:
        new.symlink_to(root.name)
    except OSError:
        return  # a file system without links
    try:
        new.replace(root.with_name("latest"))
    except OSError:  # a folder has that name
        with suppress(OSError):
            new.unlink()


@contextmanager
def refusing(what: str, remedy: str) -> Iterator[None]:
    """Turns an `OSError` into an `InputError` that names the folder that cannot be written, and the remedy."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{what} cannot be written ({error.strerror}): {remedy}") from None
