"""Why a process ended, from its last output."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aelastic.diagnose.failures.exit_reason import (
    HEADLINE_CHARS,
    TAIL_CHARS,
    Cause,
    describe_exit,
    last_exception,
    last_line,
    may_be_uncaught,
)
from aelastic.diagnose.failures.failure import ProcessFailure, printable

PLAIN = """Traceback (most recent call last):
  File "train.py", line 9, in <module>
    main()
  File "train.py", line 5, in main
    raise ValueError("batch is empty")
ValueError: batch is empty
"""


def found(text: str) -> Cause:
    cause = last_exception(text)
    assert cause is not None
    return cause


def line_of(script: str, words: str) -> int:
    return 1 + next(at for at, line in enumerate(script.split("\n")) if words in line)


class TestNoise:
    def test_torchs_rank_prefix_is_removed(self) -> None:
        text = "".join(f"[rank1]: {line}\n" for line in PLAIN.rstrip("\n").split("\n"))
        assert found(f"warming up\n{text}") == found(PLAIN)

    def test_lines_of_other_threads_between_the_frames_are_left_out(self) -> None:
        lines = [f"[rank1]: {line}" for line in PLAIN.rstrip("\n").split("\n")]
        lines.insert(2, "[rank1]:[W1017 12:00:00.000 socket.cpp:1] warning: retrying")
        lines.insert(5, "INFO: step 17")
        assert found("\n".join(lines)) == found(PLAIN)

    @pytest.mark.parametrize(
        "noise",
        [
            "[rank0]:[W1017 12:00:00.123456789 ProcessGroupNCCL.cpp:1250] Warning: process group has NOT been destroyed",
            "/usr/lib/python3/resource_tracker.py:254: UserWarning: There appear to be 1 leaked semaphore objects",
            "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f in libc10.so)",
            "Exception raised from check at Utils.cpp:1 (most recent call first):\nframe #0: main + 0x1",
            (
                "Exception ignored in: <function Loader.__del__ at 0x7f>\nTraceback (most recent call last):\n"
                '  File "loader.py", line 1, in __del__\n    x\nOSError: late'
            ),
            "Fatal Python error: Aborted\n\nCurrent thread 0x00007f (most recent call first):\n  <no Python frame>",
        ],
    )
    def test_noise_after_the_traceback_is_not_part_of_it(self, noise: str) -> None:
        assert found(f"{PLAIN}{noise}\n") == found(PLAIN)

    def test_colours_are_removed(self) -> None:
        text = PLAIN.replace("train.py", "\x1b[35mtrain.py\x1b[0m").replace(
            "ValueError:", "\x1b[1;35mValueError\x1b[0m:"
        )
        assert found(text) == found(PLAIN)

    def test_a_progress_bar_may_stand_before_the_header_on_its_line(self) -> None:
        bar = "\r 10%|█         | 1/10 [00:01<00:09]\r 20%|██        | 2/10 [00:02<00:08]"
        assert found(bar + PLAIN) == found(PLAIN)
        assert found(bar + "\r" + PLAIN) == found(PLAIN)

    def test_only_the_last_drawing_of_a_progress_bar_is_a_line(self) -> None:
        assert last_line("loading\n 10%\r 20%\r 30%\r\n\n") == "30%"

    def test_a_log_line_between_two_frames_is_not_the_exception(self) -> None:
        at = PLAIN.index('  File "train.py", line 5')
        assert found(f"{PLAIN[:at]}INFO: step 17\n{PLAIN[at:]}") == found(PLAIN)

    def test_frames_without_a_header_are_only_read_at_the_beginning(self) -> None:
        text = f'{PLAIN}[W1017 12:00:00.000 a.cpp:1]\n  File "other.py", line 1, in g\nOSError: other\n'
        assert found(text) == found(PLAIN)

    def test_a_line_number_that_is_none_places_nothing(self) -> None:
        cause = found(f'Traceback (most recent call last):\n  File "a.py", line {"9" * 5000}, in f\nE: x\n')
        assert (cause.headline, cause.file, cause.line) == ("E: x", "", 0)

    def test_the_beginning_may_be_cut_off(self) -> None:
        cut = PLAIN[PLAIN.index('  File "train.py", line 5') :]
        cause = found("ne 9, in <module>\n    main()\n" + cut)
        assert (cause.headline, cause.line) == ("ValueError: batch is empty", 5)
        assert cause.traceback == "... (the beginning is cut off)\n" + cut.rstrip("\n")

    def test_a_group_may_be_cut_off_too(self) -> None:
        text = '  |   File "a.py", line 3, in f\n  | ExceptionGroup: x (1 sub-exception)\n  +-+--- 1 ---\n    | KeyError: 1\n    +---\n'
        assert found(text).headline == "ExceptionGroup: x (1 sub-exception), first KeyError: 1"

    def test_the_last_of_two_tracebacks_counts(self) -> None:
        assert found(PLAIN.replace("ValueError: batch", "OSError: disk") + "retrying\n" + PLAIN) == found(PLAIN)

    def test_a_traceback_that_was_not_printed_to_its_end_is_none(self) -> None:
        assert last_exception(PLAIN[: PLAIN.rindex("ValueError:")]) is None

    def test_a_traceback_quoted_in_a_log_line_is_none(self) -> None:
        assert last_exception('{"msg": "Traceback (most recent call last):\\n  File"}\nValueError: x\n') is None

    def test_frames_in_a_message_are_part_of_the_message(self) -> None:
        text = PLAIN + '\nfrom user code:\n   File "model.py", line 3, in forward\n    return x\n'
        cause = found(text)
        assert (cause.file, cause.line) == ("train.py", 5)
        assert "model.py" in cause.traceback

    def test_a_data_loader_workers_own_traceback_gives_the_headline(self) -> None:
        text = PLAIN.replace(
            "ValueError: batch is empty", "IndexError: Caught IndexError in DataLoader worker process 0."
        )
        text += "Original " + PLAIN.replace("train.py", "data.py").replace(
            "ValueError: batch is empty", "IndexError: 7"
        )
        cause = found(text)
        assert (cause.headline, cause.file) == ("IndexError: 7", "data.py")
        assert "train.py" in cause.traceback

    def test_a_native_exception_is_a_cause_where_python_has_none(self) -> None:
        text = "terminate called after throwing an instance of 'c10::Error'\n  what():  NCCL timeout\n"
        assert found(text).headline == "c10::Error: NCCL timeout"
        fatal = (
            'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "t.py", line 4 in f\n'
        )
        cause = found(text + fatal)
        assert (cause.headline, cause.line) == ("Fatal Python error: Aborted (c10::Error: NCCL timeout)", 4)

    def test_a_rich_traceback_is_read(self) -> None:
        text = (
            "╭───────── Traceback (most recent call last) ─────────╮\n"
            "│ /job/train.py:12 in main                            │\n"
            "│ ❱ 12 │   raise ValueError('x')                      │\n"
            "╰─────────────────────────────────────────────────────╯\n"
            "ValueError: x\n"
        )
        cause = found(text)
        assert (cause.headline, cause.file, cause.line) == ("ValueError: x", "/job/train.py", 12)


QUOTED = 'Traceback (most recent call last):\n  File "child.py", line 1, in {}\nKeyError: 1\n'


class TestWhichOne:
    @pytest.mark.parametrize(
        "message",
        ["RuntimeError: child failed:\n", "RuntimeError: child failed\n\n", "RuntimeError: child failed: 7\n"],
    )
    @pytest.mark.parametrize("where", ["f", "<module>"])
    def test_a_traceback_that_a_message_quotes_is_part_of_the_message(self, message: str, where: str) -> None:
        if (where, message[-2]) == ("<module>", "7"):
            return  # could also belong to a second exception
        cause = found(PLAIN.replace("ValueError: batch is empty\n", message) + QUOTED.format(where))
        assert (cause.headline.startswith("RuntimeError: child failed"), cause.file) == (True, "train.py")
        assert "child.py" in cause.traceback

    def test_what_a_handler_printed_before_or_after_is_not_the_cause(self) -> None:
        handled = QUOTED.format("f")
        assert found(handled + PLAIN) == found(handled + "retrying\n" + PLAIN) == found(PLAIN)
        assert found(PLAIN + "\nat exit:\n" + handled).headline == "ValueError: batch is empty"

    def test_the_last_of_two_that_were_printed_at_the_top_counts(self) -> None:
        assert found(QUOTED.format("<module>") + PLAIN) == found(PLAIN)

    def test_one_that_was_handled_far_from_the_top_is_the_cause_if_there_is_no_other(self) -> None:
        cause = found(QUOTED.format("f") + "giving up\n")
        assert (cause.headline, cause.is_from_top) == ("KeyError: 1", False)

    def test_the_child_of_torchs_spawn_gives_the_headline(self) -> None:
        text = "torch.ProcessRaisedException: \n\n-- Process 0 terminated with the following error:\n" + QUOTED.format(
            "f"
        )
        cause = found(PLAIN.replace("ValueError: batch is empty\n", text))
        assert (cause.headline, cause.file) == ("KeyError: 1", "child.py")
        assert "train.py" in cause.traceback

    @pytest.mark.parametrize(
        "code, may_be", [(1, True), (120, True), (9, False), (2, False), (-11, False), (134, False)]
    )
    def test_an_uncaught_exception_exits_with_1(self, code: int, may_be: bool) -> None:
        assert may_be_uncaught(code) is may_be


# Text built from meaningful pieces reaches more code than random characters do.
PIECES = st.sampled_from(
    [
        "Traceback (most recent call last):\n",
        '  File "a.py", line 3, in f\n',
        '  File "a.py", line 3\n',
        '  File "a.py", line 99999999999999999999, in f\n',
        "    return 1\n",
        "ValueError: x\n",
        "KeyboardInterrupt\n",
        "RuntimeError:\n",
        "\n",
        "\r",
        "[rank0]: ",
        "  + Exception Group Traceback (most recent call last):\n",
        "  | ",
        "+-+---- 1 ----\n",
        "During handling of the above exception, another exception occurred:\n",
        "Original ",
        "Exception ignored in: x\n",
        "Fatal Python error: Aborted\n",
        "Current thread 0x1 (most recent call first):\n",
        '  File "a.py", line 3 in f\n',
        "terminate called after throwing an instance of 'x'\n",
        "\x1b[31m",
        "\x00",
        "\ud800",
    ]
)


@given(st.text() | st.lists(PIECES | st.text(max_size=5), max_size=60).map("".join))
def test_any_text_has_a_bounded_cause_or_none(text: str) -> None:
    cause = last_exception(text)
    if cause is not None:
        assert 0 < len(cause.headline) <= HEADLINE_CHARS
        assert "\n" not in cause.headline
        assert len(cause.traceback) <= len(text) + 100
    assert "\n" not in last_line(text)


@given(st.lists(PIECES, max_size=30).map("".join))
def test_a_traceback_at_the_end_is_found_whatever_came_before(before: str) -> None:
    assert found(f"{before}\n\n\n\n\nstarting over\n" + PLAIN).headline == "ValueError: batch is empty"


HANDLED = PLAIN.replace(" in <module>", " in train")
DUMP = (
    'Fatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n  File "t.py", line 4 in <module>\n'
)


@pytest.mark.parametrize(
    "text, words",
    [
        (PLAIN, "ValueError: batch is empty (the process then aborted: SIGABRT)"),
        (PLAIN + "terminate called without an active exception\n", "ValueError: batch is empty (the process then"),
        (
            PLAIN + "Fatal Python error: Aborted\n\n<no Python frame>\n",
            "ValueError: batch is empty (the process then",
        ),
        # The exception was handled, or may have been: the interpreter still ran the script's code.
        (HANDLED, "killed by signal 6 (SIGABRT): the process aborted itself"),
        (PLAIN + DUMP, "killed by signal 6 (SIGABRT): the process aborted itself"),
        ("terminate called without an active exception\n", "killed by signal 6 (SIGABRT): the process aborted itself"),
    ],
)
def test_a_process_that_aborts_as_its_interpreter_ends_has_failed_of_the_exception(text: str, words: str) -> None:
    assert ProcessFailure(0, 1, -6, "", stderr_tail=text).message.startswith(words)
    noted = ProcessFailure(0, 1, -6, "", stderr_tail=text, note="known better")
    assert noted.message.startswith("known better")


# Characters that move the cursor, ring, hide or reverse text, and those that no stream can print.
STIRS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ud800-\\udfff]"
)
STDERR = st.lists(PIECES | st.text(max_size=5), max_size=60).map("".join)


@given(STDERR, st.integers(-64, 255))
def test_whatever_was_printed_an_exit_that_no_exception_causes_is_named_by_its_code(text: str, code: int) -> None:
    failure = ProcessFailure(0, 1, code, "", stderr_tail=text)
    words, cause = describe_exit(code), last_exception(text)
    if code in {1, 120} and cause is not None:
        assert failure.message == printable(cause.headline)
    elif code == -6 and cause is not None and cause.is_uncaught:
        assert failure.message == printable(f"{cause.headline} (the process then aborted: SIGABRT)")
    elif failure.message != words:  # a signal that native code raises, or that a shell passes on
        assert failure.message.startswith(f"{words}; last output: ") and (code < 0 or code > 128)
    assert not STIRS.search(failure.message + failure.traceback + printable(last_line(text)))


@given(STDERR, st.sampled_from(["", "\nat exit\n" + QUOTED.format("f"), "[W1017 12:00:00.000 a.cpp:1] bye\n"]))
def test_an_uncaught_exception_is_the_cause_whatever_was_handled_before_and_after(before: str, after: str) -> None:
    text = f"{before}\n\n\n\n\nstarting over\n{PLAIN}{after}"
    failure = ProcessFailure(0, 1, 1, "", stderr_tail=text)
    assert failure.headline == "ValueError: batch is empty at train.py:5"


@pytest.mark.parametrize(
    "unit",
    [
        "Traceback (most recent call last):\n",
        "Traceback (most recent call last):\nE\n\nDuring handling of the above exception, another exception occurred:\n\n",
        'Original Traceback (most recent call last):\n  File "a", line 1, in f\nE: x\n',
        '  File "a", line 1\n',
        '  File "',
        '", line 1',
        "\x1b[1;",
        "\x1b]8;;",
        "a:1:",
        "a.<locals>",
        "  | E: x\n",
        "Fatal Python error: x\n",
        "[rank1",
        "9",
        " ",
    ],
)
@pytest.mark.timeout(60)
def test_the_time_is_linear_in_the_tail(unit: str) -> None:
    text = (unit * TAIL_CHARS)[: TAIL_CHARS * 16]
    head = 'Traceback (most recent call last):\n  File "'
    last_exception(text)  # 20 ms if linear; minutes for 64 Ki characters if quadratic
    last_exception(head + text[: TAIL_CHARS - 100])


@pytest.mark.parametrize(
    "exitcode, words",
    [
        (-11, "killed by signal 11 (SIGSEGV): it accessed memory that it may not"),
        (-9, "killed by signal 9 (SIGKILL): often the kernel's out-of-memory killer: see dmesg"),
        (-40, "killed by signal 40"),
        (-999, "killed by signal 999"),
        (0, "exited with code 0"),
        (3, "exited with code 3"),
        (126, "exited with code 126: by convention, the command was found but cannot be executed"),
        (127, "exited with code 127: by convention, the command was not found"),
        (137, "exited with code 137: by convention, its child was killed by SIGKILL"),
        (255, "exited with code 255"),
    ],
)
def test_an_exit_code_has_words(exitcode: int, words: str) -> None:
    assert describe_exit(exitcode) == words
