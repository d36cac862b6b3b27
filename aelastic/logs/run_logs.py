"""Routes the output of workers into files, and from there to the console.

    worker ──write──> file ──inotify──> GrowthWatch ──RunLogs─> Pump.wake          (event loop)
                        │                                           │
                        └────────────────────────> Follower.next_piece             (the pump's thread)
                                                            │ takes? / feed
                                                        Splitter: prefixes, bars, filters
                                                            │ piece
                                                        Sink.show ──os.write──> console, or filtered_stdout.log

    one Follower for each file that is shown; one Pump for each console stream, and one for all files that need no
    console; one Sink for each destination.  A stalled pump delays neither the loop nor the other pumps.

A worker writes its file itself, so it neither depends on the agent nor is blocked by a slow console.  The file is the
buffer: memory stays bounded, and output that a stalled console has not shown is not lost.

stderr goes through a file even if it is not kept, because its end shows why a worker died.  So does stdout if it is a
pipe or a terminal, so that a reader that stops cannot block a worker.  Such a file is scratch: blocks that have been
shown are freed, except at the end.

`logs_specs`, the user's or our own, names the files.  `latest` in `--log-dir` is a link to the newest run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio

from aelastic.base.loop.growth import GrowthWatch
from aelastic.base.loop.threads import in_thread, run_sync
from aelastic.diagnose.failures.failure import ERROR_FILE_VARIABLE
from aelastic.errors import HostError, InputError
from aelastic.logs.attempt_files import (
    DROPPED,
    AttemptFiles,
    AttemptOpener,
    ShownFile,
    link_latest,
    refusing,
    temporary_folder,
)
from aelastic.logs.attempt_files import WorkerFiles as WorkerFiles  # noqa: PLC0414  offered here
from aelastic.logs.follower import Follower, tail_of
from aelastic.logs.pump import Pump, Sink, sinks_of
from aelastic.logs_specs import LogsDest, ask, check_logs_specs, lay_out, name_of_run
from aelastic.settings import Std, streams_of
from aelastic.spec import WorkerSpec
from aelastic.workers import guard

if TYPE_CHECKING:
    from aelastic.logs.expected_output import Step

_log = logging.getLogger(__name__)

# The least time between two checks for growth, so that a worker that writes line by line does not keep the loop busy.
# Both are well below the 10 ms that a line may take; a flood costs less if more of it is shown at once.
COALESCE_S = 0.001
COALESCE_FLOOD_S = 0.003
FLOOD_BYTES = 1 << 16  # shown since the last check
_STALLED = "the console stopped taking output"
# A worker's output is searched within milliseconds.
SEARCH_LOOK_AGAIN_S = 0.01
# A file server may be slow; one that has not made a few files in this time is down.
OPEN_TIMEOUT_S = 60.0
# If the size of a file is not known by then, the disk hangs.
SIZE_TIMEOUT_S = 1.0


class RunLogs:
    """The files of one run, and their display on the console.

    No file is made before `open`, because the clean-up process must start first, and must know `scratch`.

    Raises:
        InputError: there is no folder to write to, or `logs_specs` is not a `LogsSpecs`.
    """

    def __init__(self, spec: WorkerSpec, run_id: str) -> None:
        if spec.logs_specs is not None:
            check_logs_specs(spec.logs_specs)
        self._spec = spec
        temporary, mine = temporary_folder(spec.log_dir), os.urandom(4).hex()
        # Files that the user did not request, removed at the end.
        self.scratch = temporary / f"aelastic_{mine}"
        self._log_dir = None if spec.logs_specs is not None or _drops_all(spec) else spec.log_dir
        both, ranks = (spec.redirects, spec.tee), range(spec.local_world_size)
        asks = any(streams_of(streams, rank) for streams in both for rank in ranks)
        self._is_asked = spec.logs_specs is None and not _drops_all(spec) and asks
        kept = temporary / f"aelastic_logs_{mine}" if self._is_asked else self.scratch
        self.root = Path(os.path.abspath(self._log_dir or kept), f"{name_of_run(run_id)}_{mine}")
        self._growth = GrowthWatch()
        self._waiting = anyio.CancelScope()  # for growth
        self._has_grown = anyio.Event()
        out, err = sinks_of(sys.stdout, sys.stderr)
        self._sinks: dict[Std, Sink] = {Std.OUT: out, Std.ERR: err}
        self._pump_of = {Std.OUT: Pump()}
        self._pump_of[Std.ERR] = self._pump_of[Std.OUT] if out is err else Pump()
        self._quiet_pump = Pump()  # for files that need no console: filtered lines, scratch that is not shown
        self._pumps = list(dict.fromkeys([*self._pump_of.values(), self._quiet_pump]))
        self._opened = AttemptFiles()  # of this attempt

    @property
    def kept(self) -> Path | None:
        """The folder of the run if it is kept; `None` if all is scratch, or the user's `logs_specs` names the files."""
        return self.root if self._log_dir is not None or self._is_asked else None

    async def open(self) -> None:
        """Makes the folder of the run.

        Raises:
            InputError: it cannot be written.
            HostError: its disk does not answer.
        """
        try:
            await in_thread(self._make_folders, within_s=OPEN_TIMEOUT_S)
        except TimeoutError:
            place = f"{self.scratch.parent} or {self.root.parent}"
            raise HostError.no_answer_from_disk(place, within_s=OPEN_TIMEOUT_S) from None
        if self._is_asked and self._log_dir is None:
            _log.warning("worker output is kept in %s; use --log-dir to choose another folder", self.root)

    def _make_folders(self) -> None:
        with refusing(f"temporary folder {self.scratch.parent}", "set TMPDIR to another"):
            self.scratch.mkdir(mode=0o700, parents=True)
        with refusing(f"log folder {self.root.parent}", "choose another with --log-dir"):
            if self._log_dir is None and self._is_asked:
                self.root.parent.mkdir(mode=0o700, parents=True)  # its parent is shared with other users of the machine
            self.root.mkdir(parents=True)
        if self._log_dir is not None:
            link_latest(self.root)

    async def open_attempt(self, attempt: int, envs: dict[int, dict[str, str]]) -> dict[int, WorkerFiles]:
        """Makes the files of the next generation, and follows those that are shown; returns them by local rank.

        Args:
            attempt: counts generations, from 0.
            envs: the complete environments of the workers; each gets the path of its error file.

        Raises:
            InputError: `logs_specs` names files that cannot be made.
            HostError: files could be made for an earlier attempt, but now cannot.
        """
        for env in envs.values():
            env.pop(ERROR_FILE_VARIABLE, None)  # the agent's own
        is_kept = self._spec.logs_specs is not None or self.kept is not None
        ended = None if is_kept or not attempt else self.root / f"attempt_{attempt - 1}"
        opener = AttemptOpener(self._spec, attempt, self.scratch, self._sinks, ended)
        opened = None
        try:
            dest = None
            if self._spec.logs_specs is not None:  # a user's hook, which may take its time
                dest = await run_sync(ask, self._spec.logs_specs, envs, abandon_on_cancel=True)
            opening = partial(opener.open, partial(self._lay_out, attempt, envs, dest), envs)
            opened = await in_thread(opening, within_s=OPEN_TIMEOUT_S)
        except OSError as error:
            raise self._refusal(attempt, error) from None
        finally:
            if opened is None:
                opener.abandon()
        self._opened = opened
        if attempt == 0 and not all(each.follower.can_free for each in opened.shown):
            _log.warning(
                "the file system of %s cannot free parts of files: --keep-log-size has no effect",
                self.root,
                extra={"topic": "log-files-cannot-be-shortened"},
            )
        for each in opened.shown:
            if each.unnamed is None:
                self._show(each)
        return opened.files

    def _show(self, shown: ShownFile) -> Pump:
        shown.follower.watch = self._growth.watch(shown.follower.fileno())
        pump = self._quiet_pump if shown.stream is None else self._pump_of[shown.stream]
        pump.add(shown.follower, shown.sink)
        if shown.follower.watch is None:
            self._waiting.cancel()  # no inotify watch for this one: look at intervals from now on
        return pump

    def started(self, ids: Mapping[int, Any]) -> None:
        """Shows the output whose prefix names the worker's process, now that the process has started.

        Args:
            ids: process ids, or the back end's equivalent, by local rank.
        """
        for each in self._opened.shown:
            if each.unnamed is not None:
                each.unnamed.name_process(str(ids.get(each.rank) or "?").encode())
                each.unnamed = None
                pump = self._show(each)
                if each.follower.watch is not None:
                    pump.wake({each.follower.watch})  # the worker may have written before the watch was set

    def _lay_out(self, attempt: int, envs: dict[int, dict[str, str]], dest: LogsDest | None) -> LogsDest:
        """Makes the folders, unless the user's `logs_specs` did, and names the files."""
        if dest is not None:
            return dest
        spec, none = self._spec, _drops_all(self._spec)  # then the filter is ignored, as in torchrun
        streams = (Std.NONE, Std.NONE) if none else (spec.redirects, spec.tee)
        return lay_out(str(self.root / f"attempt_{attempt}"), envs, *streams, None if none else spec.local_ranks_filter)

    def _refusal(self, attempt: int, error: OSError) -> InputError | HostError:
        """Returns the error to raise when files cannot be made."""
        where = error.filename or self.root
        if isinstance(error, TimeoutError) and error.errno is None:
            place = where if self._spec.logs_specs is None else "the files that logs_specs names"
            return HostError.no_answer_from_disk(place, within_s=OPEN_TIMEOUT_S)
        if self._spec.logs_specs is not None and attempt == 0:
            return InputError(
                f"logs_specs: {where} cannot be written ({error.strerror}); choose another path",
                topic="a-logs_specs-object-does-not-work",
            )
        if isinstance(error, FileExistsError) and self._spec.logs_specs is None:
            return HostError(
                f"the workers' log folder {where} already exists and belongs to another run: let nothing else write "
                f"to {self.root}"
            )
        place = self.root if self._spec.logs_specs is None else where
        return HostError(f"cannot create the workers' log files in {place}: {error.strerror}")

    async def count_matches(self, local_rank: int) -> int:
        """Returns a count that has grown if the worker wrote expected output since the last call.

        Waits until everything that the worker has written by now is searched.
        """
        searched = self._opened.expected.get(local_rank, [])
        await self._have_searched([follower for follower, _ in searched])
        return sum(matcher.ask() for _, matcher in searched)

    async def have_steps(self) -> None:
        """Waits until everything that workers have written by now is searched for steps."""
        await self._have_searched([follower for each in self._opened.progress.values() for follower, _ in each])

    @staticmethod
    async def _have_searched(followers: Sequence[Follower]) -> None:
        followers = [follower for follower in followers if not follower.is_ended]
        if not followers:
            return
        ends = await run_sync(lambda: [follower.size() for follower in followers], abandon_on_cancel=True)
        for follower, end in zip(followers, ends, strict=True):
            while follower.offset < end and not follower.is_ended:  # noqa: ASYNC110  the pump has a thread
                await anyio.sleep(SEARCH_LOOK_AGAIN_S)

    async def wait_grown(self) -> None:
        """Waits until workers have written since the last call."""
        await self._has_grown.wait()
        self._has_grown = anyio.Event()

    def steps(self, ended: Collection[int] = ()) -> dict[int, Step]:
        """Returns the steps that workers of this generation have reported, by local rank.

        Args:
            ended: local ranks of workers that have ended with empty buffers.
        """
        by_rank = {
            rank: [matcher.last_step if rank in ended else matcher.step for _, matcher in searched]
            for rank, searched in self._opened.progress.items()
        }
        return {
            rank: max(filter(None, found), key=lambda found: found.step)
            for rank, found in sorted(by_rank.items())
            if any(found)
        }

    @property
    def begin_again(self) -> bool:
        """Whether a worker of this generation has reported a lower step than before."""
        return any(matcher.begins_again for searched in self._opened.progress.values() for _, matcher in searched)

    def trouble(self) -> str:
        """Returns a sentence if a disk that workers write to is full; "" otherwise."""
        for folder in dict.fromkeys([self.scratch, *(path.parent for path in self._written())]):
            try:
                if os.statvfs(folder).f_bavail == 0:
                    return f"the disk that holds {folder} is full"
            except OSError:
                pass  # the folder is gone: that is another error
        return ""

    def _written(self) -> Iterator[Path]:
        for files in self._opened.files.values():
            yield from (path for path in (files.stdout, files.stderr) if path is not None and path != DROPPED)

    def file_of(self, local_rank: int, *, is_stderr: bool) -> Path:
        """Returns the file to which a worker of this generation writes.

        Raises:
            LookupError: there is none; the message names the reason.
        """
        if (files := self._opened.files.get(local_rank)) is None:
            raise LookupError("no worker of that rank runs here")
        path = files.stderr if is_stderr else files.stdout
        if path is None or path == DROPPED:
            raise LookupError("its output is not kept: start the job with --log-dir and --tee 3 or --redirects 3")
        return path

    def tail(self, local_rank: int, *, is_searched: bool = False) -> str:
        """Returns the end of the stderr of a worker of this generation; "" if it cannot be read.  May block.

        Args:
            is_searched: if no traceback begins in the end, the result begins with the last one before it.
        """
        path = self._opened.files[local_rank].stderr
        seen = [each.follower.traceback for each in self._opened.shown if each.follower.path == path]
        return tail_of(path, max(seen, default=b"", key=len), is_searched=is_searched)

    async def end_attempt(self) -> None:
        """Shows what is left in the files of the ended workers, then closes these."""
        self.started({})
        for _, matcher in (each for searched in self._opened.expected.values() for each in searched):
            matcher.stop()
        ends: dict[Follower, int] = {}
        with suppress(TimeoutError):
            sizes = [pump.sizes for pump in self._pumps]
            for each in await in_thread(lambda: [size() for size in sizes], within_s=SIZE_TIMEOUT_S):
                ends |= each
        for pump in self._pumps:
            pump.end_followers(ends)

    async def run(self) -> None:
        """Shows output as it is written.  Runs until cancelled."""
        async with anyio.create_task_group() as tasks:
            for number, pump in enumerate(self._pumps):
                tasks.start_soon(pump.run, self._growth.forget, name=f"console {number}")
            shown = 0
            while True:
                blind = any(pump.is_blind for pump in self._pumps)
                grown: set[int] = set()
                with anyio.CancelScope() as self._waiting:
                    grown = await self._growth.wait(blind=blind)
                self._has_grown.set()
                for pump in self._pumps:
                    pump.wake(grown)
                before, shown = shown, sum(sink.bytes_taken for sink in self._sinks.values())
                await anyio.sleep(COALESCE_FLOOD_S if shown - before > FLOOD_BYTES else COALESCE_S)

    async def finish(self) -> None:
        """Waits until the console has accepted everything, or has stalled."""
        await self.end_attempt()
        async with anyio.create_task_group() as tasks:
            for pump in self._pumps:
                tasks.start_soon(pump.drain)
        if any(pump.is_stalled for pump in self._pumps):
            self._keep_scratch()

    def _keep_scratch(self) -> None:
        kept = self.scratch.with_name(f"{self.scratch.name}_kept")  # the clean-up process removes the other name
        try:
            self.scratch.rename(kept)
        except OSError:
            kept = self.scratch  # removed already
        written = (path.parent.parent for path in self._written() if self.scratch not in path.parents)
        places = dict.fromkeys([kept, *written])
        what = "not all output was shown" if any(pump.is_cut_short for pump in self._pumps) else _STALLED
        _log.warning("%s; the rest is in %s", what, " and ".join(map(str, places)))

    def cut_short(self) -> None:
        """Ends `finish` soon, even if output is left to show."""
        for pump in self._pumps:
            pump.cut_short()

    def close(self) -> None:
        """Closes open files and removes the scratch."""
        for pump in self._pumps:
            pump.close()
        self._growth.close()
        guard.remove(str(self.scratch))


def _drops_all(spec: WorkerSpec) -> bool:
    """Returns true for `--log-dir /dev/null`; as in torchrun, the workers then write to the console themselves."""
    return spec.log_dir == DROPPED
