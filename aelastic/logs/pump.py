"""A pump: shows the output files of workers on their sinks while the files grow, in one thread.

A console may stall, and the event loop must not, so each pump has a thread of its own and pumps do not wait for each
other.  Within a pump, the files take turns.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import anyio

from aelastic.host.aio import LOST, run_sync
from aelastic.logs.follower import Follower
from aelastic.logs.sinks import Sink

# Chunks of one file that are shown before the next file has its turn.
CHUNKS_PER_TURN = 32
# At the end, a console that takes nothing for this long is given up; the files are kept then.
STALL_TIMEOUT_S = 30.0
# The time that is left to a console once the user wants an end: a terminal shows what little is left at once.
HURRY_S = 0.5


class Pump:
    """Files, each with the sink that shows it, and the thread that reads and writes.

    When `run` is cancelled, a turn that is under way goes on in its thread; the files are closed after it.
    """

    def __init__(self) -> None:
        self.is_stalled = False
        self.is_hurried = False
        self._files: list[tuple[Follower, Sink]] = []
        self._grown = anyio.Event()
        self._idle_or_over = anyio.Event()
        self._grown_watches: set[int] = set()
        self._any_has_grown = False
        self._lock = threading.Lock()  # of these two
        self._is_in_turn = False  # the thread uses the files
        self._is_closed = False

    @property
    def is_blind(self) -> bool:
        """True if the growth of some file is not reported by the kernel."""
        return any(follower.watch is None for follower, _ in self._files)

    def add(self, follower: Follower, sink: Sink) -> None:
        self._files.append((follower, sink))

    def sizes(self) -> dict[Follower, int]:
        """Where the files end now.  May block; called in a thread."""
        return {follower: follower.size() for follower, _ in list(self._files) if not follower.is_ended}

    def end_followers(self, ends: Mapping[Follower, int]) -> None:
        """The workers have ended: shows what is left in the files, then closes them.

        Args:
            ends: where each file ends.  One that is missing here is on a disk that hangs: no more of it is read.
        """
        for follower, _ in self._files:
            follower.end(ends.get(follower))
        self._any_has_grown = True
        self._grown.set()

    def wake(self, watches: set[int]) -> None:
        """Reports growth, by inotify watch; `LOST` among them stands for any file."""
        mine = watches & {follower.watch for follower, _ in self._files}
        any_has_grown = self.is_blind or LOST in watches
        if mine or any_has_grown:
            self._grown_watches |= mine
            self._any_has_grown |= any_has_grown
            self._grown.set()

    def give_up(self) -> None:
        """Ends `drain`, and a `show` that waits."""
        if self._files:
            self.is_stalled = True
            self._idle_or_over.set()
            for _, sink in self._files:
                sink.give_up()

    def hurry(self) -> None:
        """Ends `drain` within `HURRY_S`, even if output is left to show."""
        if not self.is_hurried:
            self.is_hurried = True
            self._idle_or_over.set()

    async def drain(self) -> None:
        """Returns when everything has been shown, or a sink took nothing for `STALL_TIMEOUT_S`, or after `hurry`."""
        while self._files and not self.is_stalled:
            before = self._bytes_taken()
            self._idle_or_over = anyio.Event()
            is_last = self.is_hurried
            with anyio.move_on_after(HURRY_S if is_last else STALL_TIMEOUT_S) as waited:
                await self._idle_or_over.wait()
            if waited.cancelled_caught and (is_last or self._bytes_taken() == before):
                self.give_up()

    def _bytes_taken(self) -> int:
        return sum(sink.bytes_taken for _, sink in self._files)

    async def run(self, forget: Callable[[int], None]) -> None:
        """Shows what is new whenever files grow.  Runs until cancelled.

        Args:
            forget: called with each watch that is not needed any more.
        """
        limiter = anyio.CapacityLimiter(1)  # our own, so that other users of anyio's threads cannot delay it
        unfinished: list[Follower] = []
        while True:
            await self._grown.wait()
            self._grown = anyio.Event()
            watches, any_has_grown = self._grown_watches, self._any_has_grown
            self._grown_watches, self._any_has_grown = set(), False
            turn = [
                (follower, sink, follower.is_ended)
                for follower, sink in self._files
                if any_has_grown or follower.watch in watches or follower in unfinished
            ]
            unfinished = await run_sync(self._take_turn, turn, abandon_on_cancel=True, limiter=limiter)
            if unfinished and not self.is_stalled:
                self._grown.set()
            for follower, sink, was_ended in turn:
                if was_ended and follower not in unfinished:
                    self._files.remove((follower, sink))
                    if follower.watch is not None:
                        forget(follower.watch)
                    follower.close()
                    sink.close()
            if not self._files:
                self._idle_or_over.set()

    def _take_turn(self, turn: list[tuple[Follower, Sink, bool]]) -> list[Follower]:
        """Shows some of each file, and gives those that hold more.  In the thread."""
        with self._lock:
            if self._is_closed:
                return []
            self._is_in_turn = True
        try:
            return [follower for follower, sink, is_ended in turn if not _show_some(follower, sink, is_ended)]
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        with self._lock:
            self._is_in_turn = False
            if self._is_closed:
                self._close_files()

    def close(self) -> None:
        """Closes the files: at once or, if an abandoned turn still uses them, at the end of that turn.

        If they were closed while the thread uses them, it could write to, or free blocks of, another file of the
        program that has got the same descriptor since.
        """
        self.give_up()
        with self._lock:
            self._is_closed = True
            if not self._is_in_turn:
                self._close_files()

    def _close_files(self) -> None:
        for follower, sink in self._files:
            follower.close()
            sink.close()
        self._files.clear()


def _show_some(follower: Follower, sink: Sink, is_ended: bool) -> bool:
    """Shows up to a turn's worth of one file; true if that was all of it."""
    count = 0
    while not sink.is_given_up and (count < CHUNKS_PER_TURN or follower.is_within_line):
        piece = follower.next_piece(is_ended=is_ended)
        if piece is None:
            if is_ended:
                sink.show(follower.splitter, follower.splitter.end())
            return True
        if not sink.is_given_up:
            sink.show(follower.splitter, piece)
        if follower.is_at_end and not is_ended:
            return True  # else each line of a worker that writes line by line would be shown by itself
        count += 1
    return False
