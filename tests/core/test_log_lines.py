"""How console output is split into lines: prefixes, progress bars, filters, and reading a growing file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aelastic.diagnose.failures.exit_reason import last_exception
from aelastic.logs import follower as following
from aelastic.logs import lines
from aelastic.logs.follower import Follower, tail_of
from aelastic.logs.lines import FilteredLines, PrefixedLines, Splitter
from aelastic.logs.pump import Sink

P = b"[default0]:"


class Page(Sink):
    """A sink that records its lines."""

    def __init__(self) -> None:
        super().__init__()
        self.text = b""

    def _write(self, piece: bytes) -> bool:
        self.text += piece
        return True


def shown(splitter: Splitter, chunks: Iterable[bytes]) -> bytes:
    return b"".join(map(splitter.feed, chunks)) + splitter.end()


# Prefixes.


@pytest.mark.parametrize(
    "written, expected",
    [
        (b"", b""),
        (b"one\n", b"P:one\n"),
        (b"one\n\ntwo", b"P:one\nP:\nP:two\n"),
        (b"one\r\ntwo\r\n", b"P:one\r\nP:two\r\n"),
        (b"\r\n\r\n", b"P:\r\nP:\r\n"),
        (b"\r 0%\r 9%\n", b"\rP: 0%\rP: 9%\n"),
        (b" 0%\r 9%\r", b"P: 0%\rP: 9%\r\n"),
        (b"bar\r\r\nnext\n", b"P:bar\r\r\nP:next\n"),
        (b"\r\r\n", b"\rP:\r\n"),
        (b"\r", b"P:\r\n"),
        (b"\xff\x00\xfe\n", b"P:\xff\x00\xfe\n"),
    ],
)
def test_the_prefix_stands_where_text_begins(written: bytes, expected: bytes) -> None:
    assert shown(PrefixedLines(b"P:"), [written]) == expected


PIECES = st.lists(
    st.sampled_from([b"\n", b"\r", b"\r\n", b"a", b"some text", b"\xff\x00", b"\n\n", b"\r\r"]), max_size=12
).map(b"".join)
CHUNKINGS = st.tuples(PIECES, st.lists(st.integers(0, 60), max_size=6))


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


@given(CHUNKINGS, st.sampled_from([b"P:", b"", None]))
def test_any_chunking_is_shown_alike(chunking: tuple[bytes, list[int]], prefix: bytes | None) -> None:
    data, cuts = chunking
    assert shown(PrefixedLines(prefix), chunked(data, cuts)) == shown(PrefixedLines(prefix), [data])


@given(CHUNKINGS)
def test_without_the_prefixes_it_is_what_was_written(chunking: tuple[bytes, list[int]]) -> None:
    data, cuts = chunking
    last = b"" if not data or data.endswith(b"\n") else b"\n"
    assert shown(PrefixedLines(b"P:"), chunked(data, cuts)).replace(b"P:", b"") == data + last


@given(CHUNKINGS)
def test_every_line_and_every_frame_has_its_prefix(chunking: tuple[bytes, list[int]]) -> None:
    data, cuts = chunking
    texts = re.split(rb"\r\n|\n|\r", shown(PrefixedLines(b"P:"), chunked(data, cuts)))
    assert all(text.startswith(b"P:") for text in texts if text)


@given(CHUNKINGS)
def test_what_is_passed_on_is_passed_on_unchanged(chunking: tuple[bytes, list[int]]) -> None:
    data, cuts = chunking
    assert shown(PrefixedLines(None), chunked(data, cuts)) == data


# Interruptions.


def page_of(*turns: tuple[Splitter, bytes]) -> bytes:
    page = Page()
    for splitter, data in turns:
        if piece := splitter.feed(data):
            page.show(splitter, piece)
    return page.text


def test_a_bar_is_ended_before_another_rank_writes_and_continues_below() -> None:
    bar, other = PrefixedLines(b"0:"), PrefixedLines(b"1:")
    assert page_of((bar, b"\r 0%"), (bar, b"\r 1%"), (other, b"here\n"), (bar, b"\r 2%"), (bar, b"\n")) == (
        b"\r0: 0%\r0: 1%\n1:here\n\r0: 2%\n"
    )


def test_two_bars_never_share_a_line() -> None:
    one, two = PrefixedLines(b"0:"), PrefixedLines(b"1:")
    assert page_of((one, b"\r 0%"), (two, b"\r 5%"), (one, b"\r 1%"), (two, b"\r 6%")) == (
        b"\r0: 0%\n\r1: 5%\n\r0: 1%\n\r1: 6%"
    )


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_a_line_that_was_ended_for_another_is_not_ended_twice(ending: bytes) -> None:
    bar, other = PrefixedLines(b"0:"), PrefixedLines(b"1:")
    assert page_of((bar, b"\r99%"), (other, b"here\n"), (bar, ending + b"done\n")) == b"\r0:99%\n1:here\n0:done\n"


def test_a_last_line_without_its_newline_is_ended_once() -> None:
    page, one, two = Page(), PrefixedLines(b"0:"), PrefixedLines(b"1:")
    for splitter, piece in ((one, one.feed(b"last")), (one, one.end()), (two, two.feed(b"here\n"))):
        page.show(splitter, piece)
    assert page.text == b"0:last\n1:here\n"


def test_text_that_is_passed_on_shares_no_line_with_another_rank() -> None:
    one, two = PrefixedLines(None), PrefixedLines(None)
    assert page_of((one, b"text"), (two, b"other\n"), (one, b"\n"), (two, b"more\n")) == b"text\nother\nmore\n"


@given(st.lists(st.tuples(st.integers(0, 2), PIECES), max_size=12))
def test_nothing_of_two_ranks_shares_a_line(turns: list[tuple[int, bytes]]) -> None:
    cuts = [PrefixedLines(b"%d:" % rank) for rank in range(3)]
    for line in re.split(rb"\n", page_of(*[(cuts[rank], data) for rank, data in turns])):
        assert len(set(re.findall(rb"[012]:", line))) <= 1


@given(st.lists(st.tuples(st.integers(0, 2), PIECES), max_size=12))
def test_interruptions_lose_no_text(turns: list[tuple[int, bytes]]) -> None:
    cuts = [PrefixedLines(b"%d:" % rank) for rank in range(3)]
    text = page_of(*[(cuts[rank], data) for rank, data in turns])
    for rank, splitter in enumerate(cuts):
        mine = b"".join(part for part in re.findall(rb"%d:([^\r\n]*)" % rank, text))
        assert mine == re.sub(rb"[\r\n]", b"", b"".join(data for each, data in turns if each == rank))
        assert splitter.end().strip(b"\r\n%d:" % rank) == b""


# How much is taken at once.


def takes(splitter: Splitter, chunk: bytes, held: int = 0, *, more: bool = False) -> int:
    return splitter.takes(chunk, held, more=more)


def test_whole_lines_are_taken_and_a_partial_one_waits() -> None:
    assert takes(PrefixedLines(P), b"one\ntwo") == 4
    assert takes(PrefixedLines(P), b"two") == 0


def test_a_bar_is_taken_at_once() -> None:
    splitter = PrefixedLines(P)
    assert takes(splitter, b"one\n\r 5%") == 8
    splitter.feed(b"one\n\r 5%")
    assert takes(splitter, b" of 7") == 5
    assert takes(splitter, b" of 7\npartial") == 6


def test_a_bar_that_ends_with_its_return_is_taken_at_once() -> None:
    splitter = PrefixedLines(P)
    assert takes(splitter, b" 5%\r") == 4
    assert splitter.feed(b" 5%\r") == P + b" 5%"


def test_after_the_newline_of_an_interrupted_bar_a_partial_line_waits() -> None:
    splitter = PrefixedLines(P)
    splitter.feed(b"\r99%")
    splitter.interrupt()
    splitter.feed(b"\n")
    assert takes(splitter, b"the beginning of a line") == 0


def test_what_is_passed_on_waits_for_nothing_unless_the_rest_of_the_line_is_there() -> None:
    assert takes(PrefixedLines(None), b"one\nprompt: ") == 12
    assert takes(PrefixedLines(None), b"one\ntw", more=True) == 4
    assert takes(PrefixedLines(None), b"tw", more=True) == 0


def test_a_line_beyond_the_limit_is_shown_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 8)
    assert takes(PrefixedLines(P), b"12345678") == 0
    assert takes(PrefixedLines(P), b"9", held=8) == 1
    assert takes(PrefixedLines(P), b"9\n1", held=8) == 2


# Filters.


@given(CHUNKINGS)
def test_filtered_lines_are_those_with_the_text_whatever_the_chunks(chunking: tuple[bytes, list[int]]) -> None:
    data, cuts = chunking
    *whole, last = data.split(b"\n")
    chosen = [line for line in [*whole, *([last] if last else [])] if b"text" in line or b"a" in line]
    expected = b"".join(b"P:" + line + b"\n" for line in chosen)
    assert shown(FilteredLines(b"P:", ["text", "a"]), chunked(data, cuts)) == expected


def test_a_filter_matches_within_one_line_only() -> None:
    assert shown(FilteredLines(b"P:", ["a\nb", "c\n"]), [b"a\nb\nc\ncd\n"]) == b"P:c\n"


def test_the_empty_filter_matches_every_line() -> None:
    assert shown(FilteredLines(b"P:", [""]), [b"a\n\nb\n"]) == b"P:a\nP:\nP:b\n"


def test_a_filter_keeps_no_line_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 8)
    splitter = FilteredLines(b"P:", ["x"])
    assert splitter.takes(b"x2345678", 0, more=False) == 0
    assert splitter.feed(b"x23456789") == b"P:x23456789\n"


# Growing files.


def pieces(follower: Follower, *, is_ended: bool = False) -> list[bytes]:
    found = []
    while (piece := follower.next_piece(is_ended=is_ended)) is not None:
        found.append(piece)
    return [*found, follower.splitter.end()] if is_ended else found


@pytest.fixture(params=[8, following.CHUNK_BYTES])
def small_chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "CHUNK_BYTES", request.param)
    monkeypatch.setattr(following, "SHORT_BYTES", 4)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("prefix", [b"P:", None])
@given(writes=st.lists(PIECES, max_size=8))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_file_is_shown_whole_however_it_grows(tmp_path: Path, prefix: bytes | None, writes: list[bytes]) -> None:
    path = tmp_path / "stdout.log"
    with path.open("wb", buffering=0) as file:
        follower = Follower(path, PrefixedLines(prefix))
        seen: list[bytes] = []
        for number, data in enumerate(writes, 1):
            file.write(data)
            seen += pieces(follower)
            written = b"".join(writes[:number])
            if prefix is None:
                assert b"".join(seen) == written
            assert b"".join(seen).count(b"\n") == written.count(b"\n")
    seen += pieces(follower, is_ended=True)
    follower.close()
    assert b"".join(seen) == shown(PrefixedLines(prefix), writes)


def test_a_line_is_shown_when_it_is_complete_and_memory_holds_a_chunk_of_it(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.touch()
    follower = Follower(path, PrefixedLines(P))
    long = b"x" * 10_000_000
    with path.open("ab", buffering=0) as file:
        for begin in range(0, len(long), 700_000):
            file.write(long[begin : begin + 700_000])
            assert pieces(follower) == []
        file.write(b"\nnext")
    found = pieces(follower)
    assert b"".join(found) == P + long + b"\n"
    assert max(map(len, found)) <= following.CHUNK_BYTES + len(P)
    follower.close()


def test_a_file_that_is_truncated_stops_nothing(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.touch()
    follower = Follower(path, PrefixedLines(P))
    path.write_bytes(b"x" * 3 * following.CHUNK_BYTES)
    assert pieces(follower) == []
    path.write_bytes(b"")
    assert b"".join(pieces(follower, is_ended=True)) == b""
    follower.close()


def test_a_file_ends_where_it_does_when_its_end_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"")
    follower = Follower(path, PrefixedLines(P))
    path.write_bytes(b"of this attempt\nand")
    follower.end(follower.size())
    with path.open("ab") as file:
        file.write(b" of the next\n")
    assert b"".join(pieces(follower, is_ended=True)) == P + b"of this attempt\n" + P + b"and\n"
    follower.close()


def test_what_a_file_held_before_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.write_bytes(b"of an earlier attempt\n")
    follower = Follower(path, PrefixedLines(P))
    with path.open("ab") as file:
        file.write(b"new\n")
    assert pieces(follower) == [P + b"new\n"]
    follower.close()


HEADED = b'Traceback (most recent call last):\n  File "t.py", line 1, in <module>\nRuntimeError: too long: '


@pytest.mark.parametrize("before", [0, 1, (1 << 20) - 60, (1 << 20) + 5])
def test_the_exception_is_found_however_long_its_message_is(tmp_path: Path, before: int) -> None:
    path = tmp_path / "stderr.log"
    path.write_bytes(b"w" * before + b"\n" + HEADED + b"x" * (10 << 20) + b"\n")
    cause = last_exception(tail_of(path, b"", is_searched=True))
    assert cause is not None and cause.headline.startswith("RuntimeError: too long: xxx") and cause.file == "t.py"
    assert tail_of(path, b"", is_searched=False) == "x" * (following.TAIL_BYTES - 1) + "\n"


def test_of_a_scratch_file_the_beginning_of_the_last_traceback_is_kept_when_its_blocks_are_freed(
    tmp_path: Path,
) -> None:
    path = tmp_path / "stderr.log"
    path.touch()
    follower = Follower(path, PrefixedLines(None), is_scratch=True)
    path.write_bytes(b"Traceback (most recent call last):\nearlier\n" + b"w" * 99 + HEADED + b"x" * (3 << 20) + b"\n")
    pieces(follower)
    assert path.read_bytes().count(b"Traceback") == 0, "freed"
    cause = last_exception(tail_of(path, follower.traceback, is_searched=True))
    assert cause is not None and cause.headline.startswith("RuntimeError: too long: xxx")
    assert len(follower.traceback) == following.HEAD_BYTES
    follower.close()


def test_a_short_file_and_one_without_a_traceback_are_what_they_are(tmp_path: Path) -> None:
    path = tmp_path / "stderr.log"
    assert tail_of(path, b"", is_searched=True) == ""
    path.write_bytes(HEADED)
    assert tail_of(path, b"other", is_searched=True) == HEADED.decode()
    path.write_bytes(b"w" * (20 << 20))
    assert tail_of(path, b"", is_searched=True) == "w" * following.TAIL_BYTES


def test_a_file_that_was_closed_meanwhile_ends_where_it_was_read(tmp_path: Path) -> None:
    path = tmp_path / "stdout.log"
    path.touch()
    follower = Follower(path, PrefixedLines(P))
    path.write_bytes(b"a line\n")
    pieces(follower)
    follower.close()
    assert follower.size() == 7
