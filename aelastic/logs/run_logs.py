"""What workers write: where it goes, and how it reaches the console.

A stream that is kept goes straight into a file: the worker writes it, whatever becomes of the agent, and is
never blocked by a slow console.  What the console shows as well is read from that file as it grows.
The file is the buffer: memory stays bounded, and what a stalled console has not shown is not lost.

stderr goes through a file even when nobody asked for one, because its end tells why a worker died; stdout, where it is
a pipe or a terminal, so that nobody who stops reading holds up a worker.  Such a file is scratch: what has been
shown is given back to the file system, but for the end.

`logs_specs` says where the files are, whether it is the user's or our own.  `latest` in `--log-dir` is a link to the
folder of the run that was started last.
"""

from __future__ import annotations

import errno
import logging
import os
import resource
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template

import anyio
import anyio.to_thread

from aelastic.errors import HostError, InputError
from aelastic.failures.error_file import ERROR_FILE_VARIABLE
from aelastic.host.inotify import Growth
from aelastic.logs.console import Descriptor, Lane, Nowhere, Sink, sinks_of
from aelastic.logs.expected_output import ExpectedOutputMatcher
from aelastic.logs.follower import TAIL_BYTES, Follower
from aelastic.logs.lines import Cut, Filtered, Lines
from aelastic.logs_specs import INHERITED, LogsDest, ask, check_logs_specs, lay_out, name_of_run
from aelastic.spec import Std, WorkerSpec, streams_of
from aelastic.workers import guard

_log = logging.getLogger(__name__)

# Growth is looked at so often at most: a worker that writes line by line does not keep the loop busy with each.
# Both are well below the 10 ms that a line may take; a flood costs less where more of it is shown at once.
COALESCE_S = 0.001
COALESCE_FLOOD_S = 0.003
FLOOD_BYTES = 1 << 16  # shown since the last look
# What is open for each worker: stdout and stderr as they are shown, and what tells of its end.
FILES_PER_WORKER = 3
# What is written is searched within milliseconds.
SEARCH_LOOK_AGAIN_S = 0.01


@dataclass(frozen=True, slots=True)
class WorkerFiles:
    """Where one worker's output goes in one attempt; `None` is the agent's own stream."""

    stdout: Path | None
    stderr: Path
    error_file: Path
    return_file: Path  # what a function returns


class RunLogs:
    """The files of one run, and what of them is shown on the console.

    Nothing is made before `open`: whoever cleans up after us can be told where to look first.

    Raises:
        InputError: there is no folder to write to, or `logs_specs` is none.
    """

    def __init__(self, spec: WorkerSpec, run_id: str) -> None:
        if spec.logs_specs is not None:
            check_logs_specs(spec.logs_specs)
        self._spec = spec
        temporary, mine = _temporary_folder(spec.log_dir), os.urandom(4).hex()
        # Removed at the end: what nobody asked for.
        self.scratch = temporary / f"aelastic_{mine}"
        self._log_dir = None if spec.logs_specs is not None or _drops_all(spec) else spec.log_dir
        self._is_asked = spec.logs_specs is None and not _drops_all(spec) and _asks_for_files(spec)
        kept = temporary / f"aelastic_logs_{mine}" if self._is_asked else self.scratch
        self.root = Path(os.path.abspath(self._log_dir or kept), f"{name_of_run(run_id)}_{mine}")
        self._growth = Growth()
        self._waiting = anyio.CancelScope()  # for growth
        out, err = sinks_of(sys.stdout, sys.stderr)
        self._sinks: dict[Std, Sink] = {Std.OUT: out, Std.ERR: err}
        self._lane_of = {Std.OUT: Lane()}
        self._lane_of[Std.ERR] = self._lane_of[Std.OUT] if out is err else Lane()
        self._quiet_lane = Lane()  # what goes on without a console: filtered lines, scratch that nobody is shown
        self._lanes = list(dict.fromkeys([*self._lane_of.values(), self._quiet_lane]))
        self._files: dict[int, WorkerFiles] = {}
        self._expected: dict[
            int, list[tuple[Follower, ExpectedOutputMatcher]]
        ] = {}  # by local rank, where output is expected

    @property
    def kept(self) -> Path | None:
        """The folder of the run, if it stays; none where everything is scratch, or a `logs_specs` of the user's."""
        return self.root if self._log_dir is not None or self._is_asked else None

    def open(self) -> None:
        """Makes the folder of the run.

        Raises:
            InputError: it can't be written, or this process may not open as many files as the workers need.
        """
        _check_open_files(self._spec.local_world_size)
        with _refusing(f"temporary folder {self.scratch.parent}", "set TMPDIR to another"):
            self.scratch.mkdir(mode=0o700, parents=True)
        with _refusing(f"log folder {self.root.parent}", "choose another with --log-dir"):
            self.root.mkdir(parents=True)
        if self._log_dir is not None:
            _link_latest(self.root)
        elif self._is_asked:
            _log.warning("the workers' output is kept in %s; choose another folder with --log-dir", self.root)

    async def open_attempt(self, attempt: int, envs: dict[int, dict[str, str]]) -> dict[int, WorkerFiles]:
        """Makes the files of the next generation, by local rank, and follows those that are shown.

        Args:
            attempt: counts generations, from 0.
            envs: the complete environments of the workers; each is told its error file.

        Raises:
            InputError: `logs_specs` answers what can't be done.
            HostError: the files could be made before, and can't be any more.
        """
        for env in envs.values():
            env.pop(ERROR_FILE_VARIABLE, None)  # the agent's own
        try:
            dest = await self._reify(attempt, envs)
            self._expected = {}
            self._files = {rank: self._open(attempt, rank, dest, envs[rank]) for rank in sorted(envs)}
        except OSError as error:
            raise self._refusal(attempt, error) from None
        return self._files

    async def _reify(self, attempt: int, envs: dict[int, dict[str, str]]) -> LogsDest:
        spec = self._spec
        if spec.logs_specs is not None:
            dest = await anyio.to_thread.run_sync(ask, spec.logs_specs, envs)  # a user's hook takes its time
        else:
            none = _drops_all(spec)  # then the filter holds for nothing, as with torchrun
            dest = lay_out(
                str(self.root / f"attempt_{attempt}"),
                envs,
                Std.NONE if none else spec.redirects,
                Std.NONE if none else spec.tee,
                None if none else spec.local_ranks_filter,
            )
        for texts, path, what in (
            (spec.duplicate_stdout_filters, dest.filtered_stdout, "filtered_stdout"),
            (spec.duplicate_stderr_filters, dest.filtered_stderr, "filtered_stderr"),
        ):
            if texts and not path:
                raise InputError(f"logs_specs names no {what}: filtered lines have nowhere to go")
            if texts:
                os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644))
        return dest

    def _refusal(self, attempt: int, error: OSError) -> InputError | HostError:
        """What it means that files can't be made."""
        where = error.filename or self.root
        if self._spec.logs_specs is not None and attempt == 0:
            return InputError(f"logs_specs: {where} can't be written ({error.strerror}); name another place")
        place = self.root if self._spec.logs_specs is None else where
        return HostError(f"the workers' log files can't be made in {place}: {error.strerror}")

    def _open(self, attempt: int, rank: int, dest: LogsDest, env: dict[str, str]) -> WorkerFiles:
        prefix = self._prefix(rank, env)
        stdout = _touched(dest.stdouts.get(rank, INHERITED))
        stderr = _touched(dest.stderrs.get(rank, INHERITED))
        watches = self._spec.watches_output
        if stdout is None and (watches or self._sinks[Std.OUT].may_stall):
            stdout = self._shown_scratch(f"stdout_{attempt}_{rank}.log", rank, env, Std.OUT)
        elif stdout == _DROPPED and watches:
            stdout = self._shown_scratch(f"stdout_{attempt}_{rank}.log", rank, env, None)
        elif stdout is not None:
            self._expect(stdout, rank, env)
        if stderr is None:
            stderr = self._shown_scratch(f"stderr_{attempt}_{rank}.log", rank, env, Std.ERR)
        elif stderr == _DROPPED:
            # Where a worker's words are dropped, their end is still searched for the cause of its death.
            stderr = self._shown_scratch(f"stderr_{attempt}_{rank}.log", rank, env, None)
        else:
            self._expect(stderr, rank, env)
        for stream, teed, filtered, texts in (
            (Std.OUT, dest.tee_stdouts, dest.filtered_stdout, self._spec.duplicate_stdout_filters),
            (Std.ERR, dest.tee_stderrs, dest.filtered_stderr, self._spec.duplicate_stderr_filters),
        ):
            path = _touched(teed.get(rank, INHERITED))
            if path is None or not path.is_file():
                continue  # /dev/null, say: there is nothing to be read
            self._follow(path, Lines(prefix), self._lane_of[stream], self._sinks[stream])
            if texts:
                into = Descriptor(os.open(filtered, os.O_WRONLY | os.O_APPEND), is_ours=True)
                self._follow(path, Filtered(prefix, texts), self._quiet_lane, into)
        error_file = env.get(ERROR_FILE_VARIABLE) or dest.error_files.get(rank, "")
        if error_file in {"", os.devnull}:  # nobody keeps it: then it is for us
            error_file = str(self.scratch / f"error_{attempt}_{rank}.json")
        env[ERROR_FILE_VARIABLE] = error_file
        return WorkerFiles(stdout, stderr, Path(error_file), self.scratch / f"return_value_{attempt}_{rank}.pickle")

    def _shown_scratch(self, name: str, rank: int, env: Mapping[str, str], stream: Std | None) -> Path:
        """A file for a stream that nobody keeps: it is shown as if the worker had written to the console.

        Args:
            stream: which; `None` is shown to nobody.
        """
        path = self.scratch / name
        path.touch()
        lane, sink = (self._quiet_lane, Nowhere()) if stream is None else (self._lane_of[stream], self._sinks[stream])
        self._follow(path, Lines(None), lane, sink, is_scratch=True, sharer=self._expect(path, rank, env))
        return path

    def _expect(self, path: Path, rank: int, env: Mapping[str, str]) -> Follower | None:
        """Searches what a worker writes to a file, if something is expected of it."""
        expected = self._spec.expect_output
        if expected is None or not expected.concerns(env) or not path.is_file():
            return None
        cut = ExpectedOutputMatcher(expected.pattern)
        follower = self._follow(path, cut, self._quiet_lane, Nowhere())
        self._expected.setdefault(rank, []).append((follower, cut))
        return follower

    async def count_matches(self, local_rank: int) -> int:
        """A number that has grown when output that is expected came since it was asked for last.

        Returns once all that the worker has written by now is searched.
        """
        searched = self._expected.get(local_rank, [])
        for follower, end in [(follower, follower.size()) for follower, _ in searched if not follower.is_ended]:
            while follower.offset < end and not follower.is_ended:  # noqa: ASYNC110  the lane has a thread
                await anyio.sleep(SEARCH_LOOK_AGAIN_S)
        return sum(cut.ask() for _, cut in searched)

    def _prefix(self, rank: int, env: dict[str, str]) -> bytes:
        template = self._spec.log_line_prefix_template or "[${role_name}${local_rank}]:"
        words = {"role_name": env["ROLE_NAME"], "rank": env["RANK"], "local_rank": rank}
        return Template(template).safe_substitute(words).encode("utf-8", "surrogateescape")

    def _follow(
        self, path: Path, cut: Cut, lane: Lane, sink: Sink, *, is_scratch: bool = False, sharer: Follower | None = None
    ) -> Follower:
        follower = Follower(path, cut, is_scratch=is_scratch, sharer=sharer)
        follower.watch = self._growth.watch(follower.fileno())
        lane.add(follower, sink)
        if follower.watch is None:
            self._waiting.cancel()  # the kernel will not tell of this one: look at intervals from now on
        return follower

    def trouble(self) -> str:
        """A sentence where a disk that workers write to is full; else ""."""
        for folder in dict.fromkeys([self.scratch, *(path.parent for path in self._written())]):
            try:
                if os.statvfs(folder).f_bavail == 0:
                    return f"the disk that holds {folder} is full"
            except OSError:
                pass  # gone: then it is not what is full
        return ""

    def _written(self) -> Iterator[Path]:
        for files in self._files.values():
            yield from (path for path in (files.stdout, files.stderr) if path is not None and path != _DROPPED)

    def tail(self, local_rank: int) -> str:
        """The end of what a worker of this generation wrote to stderr; "" if it can't be read.  May block."""
        path = self._files[local_rank].stderr
        if not path.is_file():
            return ""  # opening a FIFO would wait for a writer
        try:
            with path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - TAIL_BYTES))
                return file.read(TAIL_BYTES).decode(errors="replace")
        except OSError:
            return ""

    def end_attempt(self) -> None:
        """Nobody writes any more: what is left in the files is shown, then they are let go."""
        for _, cut in (each for searched in self._expected.values() for each in searched):
            cut.stop()
        for lane in self._lanes:
            lane.end_followers()

    async def run(self) -> None:
        """Shows what is followed, as it is written.  Runs until cancelled."""
        async with anyio.create_task_group() as tasks:
            for number, lane in enumerate(self._lanes):
                tasks.start_soon(lane.run, self._growth.forget, name=f"console {number}")
            shown = 0
            while True:
                blind = any(lane.is_blind for lane in self._lanes)
                grown: set[int] = set()
                with anyio.CancelScope() as self._waiting:
                    grown = await self._growth.wait(blind=blind)
                for lane in self._lanes:
                    lane.wake(grown)
                before, shown = shown, sum(sink.bytes_taken for sink in self._sinks.values())
                await anyio.sleep(COALESCE_FLOOD_S if shown - before > FLOOD_BYTES else COALESCE_S)

    async def finish(self) -> None:
        """Returns when the console has taken everything, or takes no more."""
        self.end_attempt()
        async with anyio.create_task_group() as tasks:
            for lane in self._lanes:
                tasks.start_soon(lane.drain)
        if any(lane.is_stalled for lane in self._lanes):
            self._keep_scratch()

    def _keep_scratch(self) -> None:
        kept = self.scratch.with_name(f"{self.scratch.name}_kept")  # out of reach of those who remove the scratch
        try:
            self.scratch.rename(kept)
        except OSError:
            kept = self.scratch  # somebody was there before us
        written = (path.parent.parent for path in self._written() if self.scratch not in path.parents)
        places = dict.fromkeys([kept, *written])
        _log.warning("the console takes no more output: what it has not shown is in %s", " and ".join(map(str, places)))

    def give_up(self) -> None:
        """Ends `finish` now, whatever the console has taken."""
        for lane in self._lanes:
            lane.give_up()

    def close(self) -> None:
        """Closes what is open and removes the scratch."""
        for lane in self._lanes:
            lane.close()
        self._growth.close()
        guard.remove(str(self.scratch))


_DROPPED = Path(os.devnull)


def _drops_all(spec: WorkerSpec) -> bool:
    """Whether the user's log folder is `/dev/null`; torchrun then lets the workers write to the console themselves."""
    return spec.log_dir == _DROPPED


def _asks_for_files(spec: WorkerSpec) -> bool:
    ranks = range(spec.local_world_size)
    return any(streams_of(streams, rank) for streams in (spec.redirects, spec.tee) for rank in ranks)


def _check_open_files(local_world_size: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit != resource.RLIM_INFINITY and local_world_size * FILES_PER_WORKER > limit:
        raise InputError(
            f"local_world_size is {local_world_size}, and this process may open {limit} files, "
            f"{FILES_PER_WORKER} for each worker at least: start fewer workers, or raise the limit (ulimit -n)"
        )


def _touched(path: str) -> Path | None:
    """A file that is there from now on; `None` for the agent's own stream."""
    if path == INHERITED:
        return None
    absolute = Path(os.path.abspath(path))
    if absolute.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(absolute))
    if absolute != _DROPPED:
        absolute.touch()
    return absolute


def _temporary_folder(otherwise: Path | None) -> Path:
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError:  # a container whose root is read-only, say
        if otherwise is None:
            raise InputError("no temporary folder can be written: set TMPDIR to one, or use --log-dir") from None
        return Path(os.path.abspath(otherwise))


def _link_latest(root: Path) -> None:
    """Makes `latest` beside the folder of the run lead to it: the old link, or the new one, at any time."""
    new = root.with_name(f".{root.name}.latest")
    try:
        new.symlink_to(root.name)
    except OSError:
        return  # a file system without links
    try:
        new.replace(root.with_name("latest"))
    except OSError:  # somebody has a folder of that name
        with suppress(OSError):
            new.unlink()


@contextmanager
def _refusing(what: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{what} can't be written ({error.strerror}): {remedy}") from None
