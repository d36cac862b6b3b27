"""Collects the stacks of workers before they are sent SIGKILL.

A worker that does not end when it is asked to, or that a watch wants stopped, hangs somewhere, and once it is dead
nobody can find out where.  So the stacks of all workers are collected first, which takes at most `collect.TIMEOUT_S`
and mostly less than 0.1 s.  They are written to `stack.txt` beside the worker's logs if logs are kept, otherwise into
the run's scratch folder; the parts that reports quote are kept here.


Workers that end when they are asked to cause no cost: `collect` is not even imported.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import anyio

from aelastic.agent.resources import GenerationContext
from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.observe.run_events import StacksTaken

if TYPE_CHECKING:
    from aelastic.diagnose.stacks.collect import Stack
    from aelastic.diagnose.stacks.format import Thread

_log = logging.getLogger(__name__)

NAME = "stack.txt"
# Dumps of one attempt are appended up to this size; then the file starts over.
FILE_BYTES_MAX = 16 << 20
# How much of a stack a report quotes, here and on other nodes: 40 frames mostly have 4 KiB.
QUOTE_CHARS_MAX = 8 << 10
# Lines that are logged when workers are killed: as many as most nodes have workers.
LINES_MAX = 8
NOT_OURS = "not a process of this machine"
NOT_STARTED = "not started"
NO_ANSWER = "no answer in time"
# A worker's Python has started after the first one; on a slow machine, after all of these.
FIRST_LOOKS_S = (1.0, 4.0, 15.0)
NO_DUMP = "killed immediately"

_DROPPED = Path(os.devnull)


class StackDumps:
    """Stack dumps of the workers of one generation."""

    def __init__(self, context: GenerationContext) -> None:
        self._context, self._group = context, context.group
        self._is_local, self._scratch = context.settings.is_local, context.resources.logs.scratch
        self._collected: anyio.Event | None = None  # set when the current collection is over
        self.taken = StacksTaken(0, "", {}, "")  # the last
        self._seen: dict[int, _Seen] = {}  # by local rank: its last stack
        self._dumped: set[int] = set()  # local ranks that were dumped before a kill
        self._killed_at: float | None = None  # when those that did not end were killed
        self._killed: dict[int, str] = {}  # by local rank: those that did not end, with their stacks

    # Killing.

    def claim_dump(self, local_ranks: Iterable[int], *, is_fresh: bool = False) -> bool:
        """Whether a stack dump is due for one of these ranks before it is killed; the caller must then take it.

        Args:
            is_fresh: their stacks were taken a moment ago; do not take them again.
        """
        due = self._group.exits.alive.intersection(local_ranks) - self._dumped
        self._dumped |= due
        for rank in () if is_fresh else due:
            self._seen.pop(rank, None)  # a stack from some time ago
        return self._is_local and bool(due) and not is_fresh

    def killed(self, local_rank: int) -> None:
        """A running worker was sent SIGKILL."""
        if self._is_local and local_rank not in self._killed:
            if self._killed_at is None:
                self._killed_at = clock.now()
            is_unhealthy = local_rank in self._group.exits.failed
            if not is_unhealthy or local_rank in self._context.asked_at:  # else its failure says why it is killed
                waited, where = self._waited(local_rank, self._killed_at), self._where(local_rank, self._killed_at)
                self._killed[local_rank] = f"{waited}; {where}" if where and not is_unhealthy else waited

    def _waited(self, local_rank: int, killed_at: float) -> str:
        if local_rank not in self._context.asked_at:
            return "had to be killed"
        # All are asked at nearly the same time: with equal texts, a report lists equal stacks once.
        return f"did not end within {killed_at - min(self._context.asked_at.values()):.1f} s and had to be killed"

    def _where(self, local_rank: int, killed_at: float) -> str:
        """Returns its stack, or why not; "" if none could be taken, and a second signal is why it dies."""
        seen = self._seen.get(local_rank)
        is_cut_short = self._group.is_leaving and (
            killed_at - self._context.asked_at.get(local_rank, -inf) < self._group.spec.shutdown_timeout_s
        )
        if seen is not None and not seen.has_stack and is_cut_short:
            return ""
        return f"stack {self.quote(local_rank) or f'not known ({NO_DUMP})'}"

    def quote(self, local_rank: int) -> str:
        """Returns the last stack of a worker, for a report, or ""."""
        return self._seen[local_rank].quote() if local_rank in self._seen else ""

    def threads_of(self, local_rank: int) -> Sequence[Thread] | str:
        """Returns the threads of a worker's last stack, the main one first, or why not."""
        return self._seen[local_rank].threads if local_rank in self._seen else NO_ANSWER

    def stacks_of_killed(self) -> dict[int, str]:
        """Returns a description, with the stack, of each worker that had to be killed, by global rank."""
        return {self._group.workers[rank].global_rank: text for rank, text in sorted(self._killed.items())}

    def log_innermost_frames(self, local_ranks: Iterable[int]) -> None:
        """Logs the innermost frames of workers that are about to be killed.

        If a report follows, it explains why there is no stack.
        """
        ranks = [rank for rank in local_ranks if rank in self._seen and rank in self._group.exits.alive]
        ranks = [rank for rank in ranks if self._seen[rank].has_stack or not self._group.is_leaving]
        for rank in ranks[:LINES_MAX]:
            _log.warning("rank %d %s", self._group.workers[rank].global_rank, self._seen[rank].brief())
        if len(ranks) > LINES_MAX:
            _log.warning("... and %d more ranks", len(ranks) - LINES_MAX)

    async def dump_and_log(self, local_rank: int, why: str) -> None:
        """Collects the stacks, and logs the innermost frame of one worker, which continues."""
        if self._is_local:
            await self.collect(why)
            self.log_innermost_frames([local_rank])

    # Collecting.

    async def collect(self, why: str) -> StacksTaken:
        """Takes the stacks of all workers that are alive; concurrent callers share one collection."""
        if self._group.is_done:
            return StacksTaken(self._group.generation, why, {}, "")
        if (collected := self._collected) is None:
            collected = self._collected = anyio.Event()
            self._context.tasks.start_soon(self._run, self._group.generation, why, name="stacks")
        await collected.wait()
        return self.taken

    async def _run(self, generation: int, why: str) -> None:
        found: dict[int, Stack | str] = {}
        written: dict[int, Path] = {}
        try:
            from aelastic.base.host.programs import REAP_TIMEOUT_S
            from aelastic.diagnose.failures import report  # noqa: F401  for quotes, which must not fail
            from aelastic.diagnose.stacks import format as _  # noqa: F401  as above
            from aelastic.diagnose.stacks.collect import TIMEOUT_S

            with anyio.move_on_after(TIMEOUT_S - REAP_TIMEOUT_S):
                await self._dump(found)
                texts = self._texts(found, why)
                await run_sync(_append, texts, written, abandon_on_cancel=True)
        except Exception:  # noqa: BLE001  a stack dump must never end a job
            _log.exception("cannot take the workers' stacks")
        finally:
            if generation == self._group.generation:
                kept = {rank: path for rank, path in written.items() if self._scratch not in path.parents}
                self._seen |= {rank: _Seen(each, kept.get(rank)) for rank, each in found.items()}
            sources = {rank: each if isinstance(each, str) else each.source for rank, each in sorted(found.items())}
            # The folder that contains all of them, in the layout of the attempt.
            folders = [path.parent.parent if path.name == NAME else path.parent for path in written.values()]
            folder = os.path.commonpath(folders) if folders else ""
            self.taken = StacksTaken(generation, why, sources, folder)
            assert self._collected is not None
            self._collected.set()
            self._collected = None
        self._context.emit(self.taken)

    async def warn_unless_seen(self) -> None:
        """Warns if the stack of a running worker cannot be taken here: after a hang it is too late to find out."""
        for wait_s in FIRST_LOOKS_S:
            await anyio.sleep(wait_s)
            found: dict[int, Stack | str] = {}
            await self._dump(found, 1)
            if not any(isinstance(each, str) for each in found.values()):
                return
        rank, reason = next(iter(found.items()))
        if rank in self._group.exits.alive and reason != NOT_OURS:
            number = self._group.workers[rank].global_rank
            _log.warning(
                "hangs cannot be explained: the stack of rank %d cannot be read: %s",
                number,
                reason,
                extra={"topic": "stacks-cannot-be-taken"},
            )

    async def _dump(self, found: dict[int, Stack | str], ranks_max: int | None = None) -> None:
        from aelastic.diagnose.stacks.collect import Tools, find_py_spy, take

        targets: dict[int, int] = {}
        for rank in sorted(self._group.exits.alive)[:ranks_max]:
            pid = self._group.workers[rank].id
            if not self._is_local:
                found[rank] = NOT_OURS
            elif not isinstance(pid, int) or rank not in self._context.starts:
                found[rank] = NOT_STARTED
            else:
                found[rank] = NO_ANSWER  # until an answer comes
                targets[rank] = pid
        if targets:
            usual = self._context.settings.env
            env = self._context.resources.sockets.mark_env({**usual, "RUST_BACKTRACE": "0"})
            await take(targets, Tools(find_py_spy(usual.get("PATH")), env), found)

    def _texts(self, found: Mapping[int, Stack | str], why: str) -> dict[int, tuple[Path, str]]:
        """Returns, for each worker, the file and the text to write."""
        from datetime import UTC, datetime

        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        texts = {}
        for rank, each in found.items():
            worker = self._group.workers[rank]
            source, text = ("nothing", f"{each}\n") if isinstance(each, str) else (each.source, each.text)
            head = f"=== {now}, rank {worker.global_rank} (local rank {rank}, pid {worker.id}), {why}; by {source}"
            texts[rank] = self._path(rank), f"{head}\n{text.rstrip()}\n\n"
        return texts

    def _path(self, rank: int) -> Path:
        """Returns a path beside the worker's logs, or in the scratch folder if none are kept."""
        start = self._context.starts.get(rank)
        for file in () if start is None else (start.error_file, start.stderr, start.stdout):
            if file is not None and file != _DROPPED and self._scratch not in file.parents:
                # The rank's own folder, or one that ranks share in a layout of the user's.
                return file.with_name(NAME if file.parent.name == str(rank) else f"stack_{rank}.txt")
        return self._scratch / "stacks" / str(rank) / NAME


class _Seen:
    """A worker's stack, or why not; the file at `path` keeps the whole stack after the run."""

    def __init__(self, found: Stack | str, path: Path | None) -> None:
        self._found, self._path = found, path
        self.has_stack = not isinstance(found, str)
        self.threads = found if isinstance(found, str) else found.threads

    def quote(self) -> str:
        from aelastic.diagnose.failures.report import ALL_THREADS, NO_STACK
        from aelastic.diagnose.stacks.format import quote

        if isinstance(self._found, str):
            return f"{NO_STACK}{self._found})"
        lines = quote(self._found.threads, is_kept=self._path is not None)[:QUOTE_CHARS_MAX]
        rest = "" if self._path is None else f"{ALL_THREADS}{self._path}"
        return f"by {self._found.source}, most recent call first:\n{lines}{rest}"

    def brief(self) -> str:
        from aelastic.diagnose.stacks.format import place

        if isinstance(self._found, str):
            return f"has no stack ({self._found})"
        rest = "" if self._path is None else f", all threads: {self._path}"
        return f"was in {place(self._found.threads)} ({self._found.source}{rest})"


def _append(texts: Mapping[int, tuple[Path, str]], written: dict[int, Path]) -> None:
    """Writes the texts.  Runs in a thread: disks may hang.  A stack that cannot be written is still in the report."""
    for rank, (path, text) in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            is_full = path.exists() and path.stat().st_size > FILE_BYTES_MAX
            with path.open("w" if is_full else "a", errors="replace") as file:
                file.write(text)
        except OSError as error:
            _log.warning("cannot write the stack of local rank %d to %s: %s", rank, path, error.strerror)
        else:
            written[rank] = path
