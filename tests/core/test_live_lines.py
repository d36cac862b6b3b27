"""Output above a terminal's live rows, and the rows: each line once, each bar in its last state, nothing lost."""

from __future__ import annotations

import itertools

import pyte
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kit.effort import examples

from aelastic.logs import live_lines
from aelastic.logs.live_lines import LiveLines, cut_to, width_of

UP = b"\x1b[A"


def lines_of(prefix: bytes | None = None, *, holds_text: bool = True) -> LiveLines:
    return LiveLines(prefix, (0, 0), b"[0] ", holds_text=holds_text)


def fed(lines: LiveLines, *chunks: bytes) -> list[bytes]:
    return [lines.feed(chunk) for chunk in chunks]


def test_whole_lines_go_above_and_the_open_one_is_a_row() -> None:
    lines = lines_of()
    assert fed(lines, b"one\ntw", b"o\nthree") == [b"one\n", b"two\n"]
    assert lines.rows == ["[0] three"]
    assert lines.end() == b"three" and lines.rows == [] and lines.is_open


def test_a_bar_is_one_row_until_its_newline_and_goes_above_with_its_last_state() -> None:
    lines = lines_of(b"[default0]:")
    shown = []
    for percent in range(0, 101, 10):
        shown.append(lines.feed(b"\r%3d%%" % percent))
        assert lines.rows == [f"[default0]:{percent:3}%"]
    shown.append(lines.feed(b"\n"))
    assert b"".join(shown) == b"[default0]:100%\n" and lines.rows == []


def test_a_bar_that_print_draws_with_a_return_behind_it_is_a_row_too() -> None:
    lines = lines_of()
    assert fed(lines, b"step 1\r", b"step 2\r", b"step 3", b"\r") == [b"", b"", b"", b""]
    assert lines.rows == ["[0] step 3"]
    assert lines.feed(b"\ndone\n") == b"step 3\ndone\n"


def test_the_text_behind_the_last_return_is_seen_and_kept() -> None:
    lines = lines_of()
    assert lines.feed(b"\rabcdef\rXY") == b"" and lines.rows == ["[0] XY"]
    assert lines.feed(b"\n") == b"XY\n"
    assert lines.feed(b"\rabcdef\r      \rnext\n") == b"next\n"
    assert lines.feed(b"\rabcdef\r\x1b[K") == b"" and lines.rows == []
    assert lines.feed(b"next\n") == b"\x1b[Knext\n"


def test_nested_bars_are_rows_that_stay_where_they_are() -> None:
    lines = lines_of()
    shown = fed(lines, b"\router 0", b"\n\rinner 0" + UP)
    assert lines.rows == ["[0] outer 0", "[0] inner 0"]
    for step in range(1, 50):
        shown += fed(lines, b"\n\rinner %d" % step + UP)
        assert lines.rows == ["[0] outer 0", f"[0] inner {step}"]
    shown += fed(lines, b"\n\r        " + UP, b"\router 1", b"\n", b"done\n")
    assert b"".join(shown) == b"outer 1\ndone\n" and lines.rows == []


def test_nested_bars_that_come_in_pieces_cost_a_line_at_most() -> None:
    lines = lines_of()
    pieces = [b"\router 0"]
    for step in range(20):
        pieces += [b"\n", b"\rinner %d" % step, UP]
    shown = b"".join(fed(lines, *pieces, b"\router 1", b"\n", b"done\n"))
    assert shown.count(b"\n") <= 4 and b"outer 1\n" in shown and shown.endswith(b"done\n")


def test_one_bar_after_the_other_goes_above() -> None:
    lines = lines_of()
    shown = b"".join(fed(lines, b"\repoch 1\r", b"epoch 1!\n\repoch 2 0%", b"\repoch 2 9%", b"\repoch 2 !!\n"))
    assert shown == b"epoch 1!\nepoch 2 !!\n" and lines.rows == []


def test_one_workers_own_text_is_shown_as_it_comes_and_becomes_a_row_where_a_return_follows() -> None:
    lines = lines_of(holds_text=False)
    assert fed(lines, b"(Pdb) ", b"x") == [b"(Pdb) ", b"x"] and lines.rows == []
    assert lines.feed(b"\n") == b"\n"
    assert fed(lines, b"50%", b"\r60%") == [b"50%", b"\r\x1b[K"]
    assert lines.rows == ["[0] 60%"] and not lines.is_open
    assert lines.feed(b"\n") == b"60%\n"


def test_a_line_that_others_end_is_not_ended_twice() -> None:
    lines = lines_of(holds_text=False)
    assert lines.feed(b"half") == b"half" and lines.is_open
    lines.interrupt()
    assert lines.feed(b"\nnext\n") == b"next\n"
    assert lines.feed(b"half") == b"half"
    lines.interrupt()
    assert lines.feed(b" more\n") == b" more\n"
    assert lines.feed(b"50%") == b"50%"
    lines.interrupt()
    assert lines.feed(b"\r60%\n") == b"60%\n"


def test_a_long_line_is_shown_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_lines, "ROW_BYTES_MAX", 10)
    for chunk in (b"x" * 7, b"\rx" * 30):
        lines = lines_of(b"P:")
        shown = fed(lines, *[chunk] * 3, b"\n")
        assert not lines.rows
        assert b"".join(shown).replace(b"P:", b"").endswith(b"x\n")
    lines = lines_of(b"P:")
    assert b"".join(fed(lines, *[b"x" * 7] * 3, b"\n")) == b"P:" + b"x" * 21 + b"\n"


def test_a_control_sequence_without_measure_is_text() -> None:
    lines = lines_of()
    assert lines.feed(b"\rbar\x1b[" + b"9" * 5000 + b"A") == b"" and lines.feed(b"\n").endswith(b"9A\n")


TEXTS = [b"a", b"some text", b"   ", b"50%|###   |", b"\x1b[31mred\x1b[0m", "gr\u00f6\u00dfer".encode(), b"\xff"]
DATA = st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", *TEXTS]), max_size=14).map(b"".join)
CUTS = st.lists(st.integers(0, 80), max_size=5)


def chunked(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


def screen_of(data: bytes) -> list[str]:
    screen = pyte.Screen(100, 30)
    stream = pyte.ByteStream(screen)
    stream.feed(data.replace(b"\n", b"\r\n"))
    return [row.rstrip() for row in screen.display]


def last_text(line: bytes) -> bytes:
    return next((text for text in reversed(line.split(b"\r")) if text), b"")


@settings(max_examples=examples(300), deadline=None)
@example(b"\r\r\n\ra", [3], False)
@given(DATA, CUTS, st.booleans())
def test_a_terminal_shows_the_last_text_of_each_line(data: bytes, cuts: list[int], holds_text: bool) -> None:
    data = data.replace(b"\xff", b"")
    if not holds_text:  # pyte garbles a row that is erased in the middle of a control sequence
        data = data.replace(b"\x1b[31m", b"").replace(b"\x1b[0m", b"")
    lines = lines_of(holds_text=holds_text)
    shown = b"".join(fed(lines, *chunked(data, cuts))) + lines.end()
    seen = screen_of(shown)
    while seen and not seen[-1]:
        seen.pop()
    plain = screen_of(b"\n".join(last_text(line) for line in data.split(b"\n")))
    assert plain[: len(seen)] == seen and not any(plain[len(seen) :])


@settings(max_examples=examples(300), deadline=None)
@given(DATA, CUTS, st.sampled_from([None, b"P:"]), st.booleans())
def test_without_returns_every_byte_is_shown(data: bytes, cuts: list[int], prefix: bytes | None, holds: bool) -> None:
    data = data.replace(b"\r", b"")
    lines = lines_of(prefix, holds_text=holds)
    shown = b"".join(fed(lines, *chunked(data, cuts))) + lines.end()
    expected = data
    if prefix and data:
        expected = b"".join(prefix + line + b"\n" for line in data.removesuffix(b"\n").split(b"\n"))
    assert shown == expected


@settings(max_examples=examples(300), deadline=None)
@given(st.lists(st.sampled_from([b"\n", b"\r", UP, b"\x1b[2A", *TEXTS]), max_size=20).map(b"".join), CUTS)
def test_whatever_comes_no_row_is_wild_and_the_end_shows_what_was_last(data: bytes, cuts: list[int]) -> None:
    lines = lines_of()
    shown = b"".join(fed(lines, *chunked(data, cuts)))
    assert len(lines.rows) <= live_lines.ROWS_MAX and not any("\n" in row or "\r" in row for row in lines.rows)
    last = [row.removeprefix("[0] ").strip() for row in lines.rows]
    shown += lines.end()
    assert lines.rows == []
    seen = "\n".join(screen_of(shown))
    if b"\x1b[A" not in shown and b"\x1b[2A" not in shown:  # the text itself moves the cursor
        assert all(row in seen for row in last if "\x1b" not in row and "\ufffd" not in row)


@pytest.mark.parametrize(
    "text, columns, cut",
    [
        ("abc", 5, "abc"),
        ("abcdef", 5, "abcde"),
        ("\x1b[31mabcdef\x1b[0m", 3, "abc"),
        ("a\x1b[2Kb\x1b[Ac\x07\x00d", 9, "abcd"),
        ("\x1b]0;title\x07x", 9, "x"),
        ("a\tb", 9, "a b"),
        ("日本語", 5, "日本"),
        ("e\u0301x", 2, "e\u0301x"),
        ("50%|\u2588\u2588|", 5, "50%|\u2588"),
    ],
)
def test_a_row_is_cut_by_its_columns_without_control_sequences(text: str, columns: int, cut: str) -> None:
    assert cut_to(text, columns) == cut.encode()


def test_widths_count_columns() -> None:
    assert [width_of(text) for text in (b"abc", "日本".encode(), b"\x1b[31mab\x1b[0m")] == [3, 4, 2]
