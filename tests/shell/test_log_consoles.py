"""Consoles and log files without workers: every kind of target, pumps that end, files that free space, the link."""

from __future__ import annotations

import fcntl
import io
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit.waiting import DEADLINE_S

from aelastic.logs import follower as follower_module
from aelastic.logs import pump as pump_module
from aelastic.logs.attempt_files import link_latest
from aelastic.logs.follower import Follower
from aelastic.logs.lines import PrefixedLines
from aelastic.logs.pump import DescriptorSink, Pump, Sink, StreamSink, sinks_of

MIB = 1 << 20


# Objects that replace the streams.


class Notebook:
    """Like Jupyter's stream: it has a descriptor, but output to that does not appear in the notebook."""

    def __init__(self) -> None:
        self.text = ""

    def fileno(self) -> int:
        return 1

    def write(self, text: str) -> int:
        self.text += text
        return len(text)


class Broken:
    def write(self, text: str) -> int:
        raise RuntimeError(text)


def show(sink: Sink, *pieces: bytes) -> None:
    splitter = PrefixedLines(b"[p]:")
    for piece in pieces:
        sink.show(splitter, splitter.feed(piece))


def test_an_object_gets_text_however_its_bytes_are_parted_one_that_is_more_than_its_descriptor_too() -> None:
    buffer = io.BytesIO()
    captured = io.TextIOWrapper(buffer, encoding="utf-8", write_through=True)  # like pytest's
    for stream, text in (
        (io.StringIO(), lambda each: each.getvalue()),
        (Notebook(), lambda each: each.text),
        (captured, lambda _: buffer.getvalue().decode()),
    ):
        sink, _ = sinks_of(stream, None)
        assert isinstance(sink, StreamSink)
        show(sink, "gr\u00f6".encode()[:-1], "\u00f6".encode()[1:], b"bad \xff byte\n")
        assert text(stream) == "[p]:gr\u00f6bad \N{REPLACEMENT CHARACTER} byte\n"


def test_one_object_instead_of_both_streams_has_whole_lines() -> None:
    both = io.StringIO()
    out, err = sinks_of(both, both)
    assert out is err
    first, second = PrefixedLines(b"[0]:"), PrefixedLines(b"[1]:")
    for splitter, piece in ((first, b"half"), (second, b"whole\n"), (first, b" a line\n")):
        out.show(splitter, splitter.feed(piece))
    assert both.getvalue() == "[0]:half\n[1]:whole\n[0]: a line\n"


@pytest.mark.parametrize("stream", [Broken(), None], ids=["broken", "none"])
def test_a_stream_that_takes_nothing_holds_nothing_up(stream: Any) -> None:
    sink, _ = sinks_of(stream, None)
    show(sink, b"one\n", b"two\n")
    assert sink.bytes_taken == len(b"[p]:one\n[p]:two\n") or isinstance(stream, Broken)


def test_a_console_made_non_blocking_gets_everything() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, fcntl.fcntl(writer, fcntl.F_GETFL) | os.O_NONBLOCK)
    text = (b"x" * 99 + b"\n") * 50_000
    with open(reader, "rb") as file, ThreadPoolExecutor() as threads:
        reading = threads.submit(file.read)
        sink = DescriptorSink(writer, is_ours=True)
        show(sink, text)
        sink.close()
        assert reading.result(DEADLINE_S) == text.replace(b"x" * 99, b"[p]:" + b"x" * 99)


# Pumps.


@pytest.mark.parametrize("is_stopped", [False, True])
async def test_an_end_that_is_requested_leaves_a_console_the_time_to_show_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_stopped: bool
) -> None:
    monkeypatch.setattr(pump_module, "CUT_SHORT_S", 0.3 if is_stopped else DEADLINE_S)
    reader, writer = os.pipe()
    path = tmp_path / "out.log"
    path.touch()
    sink, pump = DescriptorSink(writer, is_ours=True), Pump()
    pump.add(Follower(path, PrefixedLines(None)), sink)
    path.write_bytes(b"x" * MIB)  # more than the pipe holds

    def read_slowly() -> None:
        pump_is_asked.wait(DEADLINE_S)
        while os.read(reader, 1 << 16):
            pass

    pump_is_asked = threading.Event()
    reading = threading.Thread(target=read_slowly, daemon=True)
    if not is_stopped:
        reading.start()
    has_drained = anyio.Event()

    async def drain() -> None:
        await pump.drain()
        has_drained.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run, lambda watch: None)
        pump.end_followers(pump.sizes())
        tasks.start_soon(drain)
        await anyio.wait_all_tasks_blocked()
        pump.cut_short()
        pump_is_asked.set()
        with anyio.fail_after(DEADLINE_S):
            await has_drained.wait()
        tasks.cancel_scope.cancel()
    assert pump.is_stalled is is_stopped
    if not is_stopped:
        assert sink.bytes_taken == MIB
    pump.close()
    if not is_stopped:
        reading.join(DEADLINE_S)  # it reaches the end once nobody writes
        assert not reading.is_alive()
    os.close(reader)


class StalledSink(Sink):
    """A sink that accepts nothing until the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.is_entered, self.may_go_on, self.is_closed = (threading.Event() for _ in range(3))

    def _write(self, piece: bytes) -> bool:
        self.is_entered.set()
        return self.may_go_on.wait(DEADLINE_S)

    def close(self) -> None:
        self.is_closed.set()


async def test_a_file_stays_open_while_an_abandoned_thread_may_use_it(tmp_path: Path) -> None:
    path, sink, pump = tmp_path / "stdout.log", StalledSink(), Pump()
    path.touch()
    follower = Follower(path, PrefixedLines(None))
    pump.add(follower, sink)
    path.write_text("a line\n")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pump.run, lambda _: None)
        pump.wake(set())
        await anyio.to_thread.run_sync(sink.is_entered.wait, DEADLINE_S)
        tasks.cancel_scope.cancel()
    pump.close()
    os.fstat(follower.fileno())  # its number has not been reused
    assert not sink.is_closed.is_set()
    sink.may_go_on.set()
    assert await anyio.to_thread.run_sync(sink.is_closed.wait, DEADLINE_S)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(follower.fileno())


# Limited logs.


def test_a_limited_log_keeps_what_another_follower_of_it_has_not_read(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.touch()
    console = Follower(path, PrefixedLines(None))
    limited = Follower(path, PrefixedLines(None), keeps=MIB, sharers=[console])
    written = b"".join(b"%09d\n" % number for number in range(600_000))
    path.write_bytes(written)
    while limited.next_piece(is_ended=False):
        pass
    assert path.read_bytes() == written, "a console that stalls loses nothing"
    shown = bytearray()
    while piece := console.next_piece(is_ended=False):
        shown += piece
    assert shown == written
    with path.open("ab") as file:
        file.write(written[:MIB])
    while limited.next_piece(is_ended=False):
        pass
    assert path.read_bytes()[:MIB] == bytes(MIB) and path.read_bytes()[-MIB:] == written[:MIB]
    console.close()
    limited.close()


def test_where_a_file_system_frees_no_parts_of_files_a_follower_knows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower_module, "_fallocate", None)
    (path := tmp_path / "stdout.log").touch()
    follower = Follower(path, PrefixedLines(None), keeps=MIB)
    assert not follower.can_free
    follower.close()


# The link to the newest run.


def test_latest_leads_to_the_newest_run_at_any_time_and_a_folder_of_that_name_is_left_alone(tmp_path: Path) -> None:
    runs = [tmp_path / f"run{number}" for number in range(20)]
    for run in runs:
        run.mkdir()
    for run in runs[:2]:
        link_latest(run)
        assert os.readlink(tmp_path / "latest") == run.name
    with ThreadPoolExecutor() as threads:  # several runs at once
        for _ in threads.map(link_latest, runs):
            assert (tmp_path / "latest").resolve() in runs
    assert len([*tmp_path.iterdir()]) == len(runs) + 1
    (tmp_path / "latest").unlink()
    (tmp_path / "latest" / "mine").mkdir(parents=True)
    link_latest(runs[0])
    assert (tmp_path / "latest" / "mine").is_dir() and len([*tmp_path.iterdir()]) == len(runs) + 1
