"""Failures as values, their error files, and the report."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.stories.failures import played
from kit.stories.files import SHELL_FOLDER, changes
from kit.stories.recorded import HOOKS, TRACEBACK, Recorded, outcome, record_text, returns, written

from aelastic import errors
from aelastic.errors import (
    AelasticError,
    ChildFailedError,
    ErrorCategory,
    ErrorHandler,
    InputError,
    InternalError,
    ProcessFailure,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousStateError,
    RendezvousTimeoutError,
    UnkillableWorkerError,
    exit_code_of,
    record,
)


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process's own error file, which does not exist yet."""
    path = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


def failure_at(
    path: Path, *, exitcode: int = 1, timestamp: int = 1000, local_rank: int = 0, message: str = "", **more: Any
) -> ProcessFailure:
    path.write_text(record_text(message=message or "ValueError: batch is empty", timestamp=str(timestamp)))
    return ProcessFailure(local_rank, 100 + local_rank, exitcode, str(path), **more)


class TestTree:
    @pytest.mark.parametrize(
        "error, category, exit_code",
        [
            (InputError("x"), ErrorCategory.INPUT, 2),
            (RendezvousTimeoutError("x"), ErrorCategory.INFRA, 75),
            (RendezvousClosedError("x"), ErrorCategory.INFRA, 1),
            (RendezvousConnectionError("x"), ErrorCategory.INFRA, 1),
            (RendezvousStateError("x"), ErrorCategory.INFRA, 1),
            (UnkillableWorkerError(["pid 7"]), ErrorCategory.INFRA, 70),
            (InternalError("x"), ErrorCategory.AGENT, 70),
            (ChildFailedError("x", {0: ProcessFailure(0, 1, 9, "")}), ErrorCategory.WORKER, 9),
        ],
    )
    def test_each_error_says_whose_fault_it_is(
        self, error: AelasticError, category: ErrorCategory, exit_code: int
    ) -> None:
        assert (error.category, exit_code_of(error)) == (category, exit_code)

    def test_an_error_shows_what_it_knows(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            ChildFailedError("train.py", {})
        error = InternalError("two generations alive", ["spawned 1", "spawned 2"])
        assert error.trace == error.story == ("spawned 1", "spawned 2")
        assert str(error).endswith("\n  spawned 1\n  spawned 2")
        assert "pid 7 (rank 3)" in str(UnkillableWorkerError(["pid 7 (rank 3)"]))

    def test_errors_survive_pickling(self, tmp_path: Path) -> None:
        first = ChildFailedError("train.py", {3: failure_at(tmp_path / "e.json", note="n")}, {1: "SIGTERM"})
        for error in (first, InternalError("x", ["a"]), UnkillableWorkerError(["pid 7"])):
            copy = pickle.loads(pickle.dumps(error))
            assert (type(copy), str(copy)) == (type(error), str(error))

    @pytest.mark.parametrize(
        "exitcode, code", [(1, 1), (77, 77), (-9, 137), (-15, 143), (0, 1), (256, 1), (512 + 3, 3)]
    )
    def test_a_failures_exit_code_is_never_0(self, exitcode: int, code: int) -> None:
        assert exit_code_of(ProcessFailure(0, 1, exitcode, "")) == code
        assert exit_code_of(RuntimeError()) == 1


class TestProcessFailure:
    def test_its_time_is_that_of_the_error_file_or_of_the_end(self, tmp_path: Path) -> None:
        before = int(time.time())
        recorded, killed = failure_at(tmp_path / "e.json", exitcode=1, timestamp=77), ProcessFailure(0, 1, -9, "")
        assert recorded.timestamp == 77 and before <= killed.timestamp <= time.time()
        assert f"  time      : {recorded.timestamp_isoformat()}\n" in str(ChildFailedError("x", {0: recorded}))
        assert recorded.error_file_data == json.loads(record_text(timestamp="77"))

    @pytest.mark.parametrize("exitcode, name", [(-9, "SIGKILL"), (1, "<N/A>"), (-999, "<N/A>")])
    def test_a_signal_has_a_name(self, exitcode: int, name: str) -> None:
        failure = ProcessFailure(0, 1, exitcode, "")
        assert (failure.signal_name(), failure.is_signal) == (name, exitcode < 0)

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b'{"message": {"message": "Value',
            b"\x00\xff\xfe binary",
            b"[1, 2]",
            b"null",
            b"[" * 100_000,
            b'{"message": 7}',
            b'{"message": {"message": ["x"], "extraInfo": "y"}}',
            b'{"message": {"extraInfo": {"py_callstack": 7, "timestamp": "soon"}}}',
            b'{"message": {"message": "", "extraInfo": {"timestamp": 1e999}}}',
            b'{"message": "", "timestamp": ' + b"9" * 5000 + b"}",
            b'{"message": "' + b"x" * (2 << 20) + b'"}',
        ],
    )
    def test_a_damaged_error_file_leaves_the_word_to_stderr(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "e.json"
        path.write_bytes(content)
        failure = ProcessFailure(0, 1, 1, str(path), stderr_tail=TRACEBACK)
        assert (failure.message, failure.error_file) == ("ValueError: batch is empty", str(path))
        assert failure.timestamp > 1000
        assert "ValueError" in str(ChildFailedError("x", {0: failure}))

    def test_a_fifo_or_a_folder_is_not_an_error_file(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        for path in (tmp_path / "fifo", tmp_path):
            assert ProcessFailure(0, 1, 3, str(path)).message == "exited with code 3"

    def test_what_cannot_be_printed_is_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "e.json").write_text(record_text(message="bad \ud800 text", traceback="\udfff"))
        report = str(ChildFailedError("x", {0: ProcessFailure(0, 1, 1, str(tmp_path / "e.json"))}))
        assert "bad ? text" in report and report.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(
            st.sampled_from(["message", "extraInfo", "py_callstack", "timestamp", "callstack"]) | st.text(), inner
        )
    ),
)


@settings(deadline=None)  # its first example imports the module that explains exits
@given(data=st.dictionaries(st.sampled_from(["message", "timestamp", "callstack"]), JSON))
def test_no_shape_of_error_file_raises(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "shape.json"
    path.write_text(json.dumps(data))
    failure = ProcessFailure(0, 1, 1, str(path))
    assert failure.message
    assert str(ChildFailedError("x", {0: failure})).encode()


class TestReport:
    def test_its_stories_go_as_written(self) -> None:
        assert changes(SHELL_FOLDER / "failures.txt", played) == "", "if the change is intended: `make stories`"

    def test_many_stopped_ranks_are_ranges(self) -> None:
        victims = [*range(1, 1000), 1001]
        assert "ranks 1-999, 1001\n" in str(ChildFailedError("x", {0: ProcessFailure(0, 1, 1, "")}, victims))

    def test_it_has_a_limit(self) -> None:
        failures = {n: ProcessFailure.from_elsewhere("h", n, 0, n, 1, f"m {n}", "x\n" * 2_000) for n in range(200)}
        report = str(ChildFailedError("x", failures))
        assert len(report) < 150_000
        assert "... and 135 more: ranks 65-199" in report


@pytest.mark.parametrize(
    "code", ["\x1b[2J", "\x1b]0;title\x07", "\x07", "\x00", "\x9b31m", "\u202e", "\u2066", "\u2028"]
)
def test_nothing_that_moves_a_terminal_gets_into_the_report(tmp_path: Path, code: str) -> None:
    path = tmp_path / "e.json"
    path.write_text(record_text(message=f"E: a{code}b", traceback=f"Traceback{code}\r\nE: a{code}b"))
    tail = f'Traceback (most recent call last):\n  File "a{code}.py", line 1, in <module>\nE: a{code}b\n'
    recorded, printed = ProcessFailure(0, 1, 1, str(path)), ProcessFailure(0, 1, 1, "", stderr_tail=tail)
    last = ProcessFailure(0, 1, 3, "", stderr_tail=f"giving{code} up\n", log_file=f"/logs/{code}/stderr.log")
    elsewhere = ProcessFailure.from_elsewhere(f"h{code}", 0, 0, 1, 1, f"E: a{code}b", f"E: a{code}b", note=code)
    for failure in (recorded, printed, last, elsewhere):
        report = str(ChildFailedError(f"train{code}.py", {0: failure}))
        assert [each for each in report if not (each.isprintable() or each == "\n")] == []
    assert recorded.message.startswith("E: a") and recorded.message.endswith("b")


def raising(error: BaseException) -> Callable[[], None]:
    def main() -> None:
        raise error

    return main


class TestErrorHandler:
    def test_an_exception_is_recorded_without_our_own_frames(self, error_file: Path) -> None:
        @record
        def main(value: int) -> None:
            """What main does."""
            raise ValueError(f"bad {value}")

        assert (main.__name__, main.__doc__) == ("main", "What main does.")
        with pytest.raises(ValueError, match="bad 7"):
            main(7)
        message = written(error_file)["message"]
        assert message["message"] == "ValueError: bad 7"
        assert errors.__file__ not in message["extraInfo"]["py_callstack"]
        assert "in main\n" in message["extraInfo"]["py_callstack"]
        assert int(message["extraInfo"]["timestamp"]) > 1_600_000_000
        assert [path.name for path in error_file.parent.iterdir()] == ["own.json"]

    def test_a_chained_exception_is_recorded_whole(self, error_file: Path) -> None:
        def main() -> None:
            try:
                int("lr")
            except ValueError as error:
                raise RuntimeError("no config") from error

        with pytest.raises(RuntimeError):
            record(main)()
        callstack = written(error_file)["message"]["extraInfo"]["py_callstack"]
        assert "ValueError: invalid literal" in callstack and "direct cause" in callstack

    def test_an_exception_whose_text_cannot_be_had_is_recorded(self, error_file: Path) -> None:
        class Mute(Exception):
            def __str__(self) -> str:
                raise TypeError("no text")

        with pytest.raises(Mute):
            record(raising(Mute()))()
        assert written(error_file)["message"]["message"].startswith("Mute: <")

    @pytest.mark.parametrize("code, is_raised", [(0, False), (None, True), (3, True), ("words", True)])
    def test_exits_are_not_recorded_and_exit_0_returns(self, error_file: Path, code: Any, is_raised: bool) -> None:
        main = record(raising(SystemExit(code)))
        if is_raised:
            with pytest.raises(SystemExit) as raised:
                main()
            assert raised.value.code == code
        else:
            assert main() is None
        assert not error_file.exists()

    def test_the_root_cause_is_passed_on_with_its_exit_code(self, error_file: Path, tmp_path: Path) -> None:
        error = ChildFailedError("x", {0: failure_at(tmp_path / "child.json", exitcode=-11)})
        with pytest.raises(ChildFailedError):
            record(raising(error))()
        expected = json.loads(record_text())
        expected["message"]["errorCode"] = -11
        assert written(error_file) == expected

    def test_a_cause_without_an_error_file_is_written_too(self, error_file: Path) -> None:
        failure = ProcessFailure(0, 1, 1, "", stderr_tail=TRACEBACK, oom="out of memory")
        with pytest.raises(ChildFailedError):
            record(raising(ChildFailedError("x", {0: failure})))()
        message = written(error_file)["message"]
        assert (message["message"], message["errorCode"]) == ("ValueError: batch is empty; out of memory", 1)
        assert message["extraInfo"]["py_callstack"] == TRACEBACK.rstrip("\n")

    def test_a_cause_from_elsewhere_is_not_looked_for_here(self, error_file: Path) -> None:
        failure = ProcessFailure.from_elsewhere("node2", 0, 0, 1, 5, "m", "t", 9)
        ErrorHandler().write_failure(failure)
        assert written(error_file)["message"] == {
            "message": "m",
            "extraInfo": {"py_callstack": "t", "timestamp": "9"},
            "errorCode": 5,
        }

    @pytest.mark.parametrize("content", [b"", b'{"mess', b"\xff", b"[]"])
    def test_a_damaged_cause_is_reported_as_damaged(self, error_file: Path, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "child.json").write_bytes(content)
        ErrorHandler().dump_error_file(str(tmp_path / "child.json"), 3)
        message = written(error_file)["message"]
        assert "child.json cannot be read" in message["message"] and message["errorCode"] == 3

    def test_a_record_whose_message_is_a_sentence_is_copied_as_it_is(self, error_file: Path, tmp_path: Path) -> None:
        (tmp_path / "child.json").write_text('{"message": "no GPU", "timestamp": 7}')
        ErrorHandler().dump_error_file(str(tmp_path / "child.json"), 3)
        assert written(error_file) == {"message": "no GPU", "timestamp": 7}

    def test_without_a_file_the_record_is_logged(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
        ErrorHandler().record_exception(ValueError("lost"))
        assert "ValueError: lost" in caplog.text

    @pytest.mark.parametrize("path", ["/no/such/folder/e.json", "bad\0name", "."])
    def test_a_path_that_cannot_be_written_costs_one_warning(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, path: str
    ) -> None:
        monkeypatch.setattr(ErrorHandler, "_get_error_file_path", lambda self: path)
        ErrorHandler().record_exception(ValueError("lost"))
        assert [each.levelno for each in caplog.records] == [logging.WARNING]
        assert "ValueError: lost" in caplog.text

    def test_a_special_file_is_written_in_place_and_not_replaced(self, tmp_path: Path, error_file: Path) -> None:
        os.mkfifo(error_file)
        reader = os.open(error_file, os.O_RDONLY | os.O_NONBLOCK)
        try:
            ErrorHandler().record_exception(ValueError("x"))
            assert error_file.is_fifo()
            assert json.loads(os.read(reader, 65536))["message"]["message"] == "ValueError: x"
        finally:
            os.close(reader)

    def test_a_busy_file_is_written_in_place(self, error_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def replace(source: str, target: str) -> None:
            raise OSError(errno.EBUSY, "a mount point")

        error_file.write_text("old and longer than anything that is written next" * 100)
        monkeypatch.setattr(os, "replace", replace)
        ErrorHandler().record_exception(ValueError("x"))
        assert written(error_file)["message"]["message"] == "ValueError: x"
        assert len(list(error_file.parent.iterdir())) == 1

    def test_a_handler_of_the_users_is_used_and_cannot_hide_the_exception(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        calls: list[str] = []

        class Handler(ErrorHandler):
            def initialize(self) -> None:
                calls.append("initialize")

            def record_exception(self, e: BaseException) -> None:
                calls.append(str(e))
                raise OSError("disk full")

        with pytest.raises(ValueError, match="the cause"):
            record(raising(ValueError("the cause")), Handler())()
        assert calls == ["initialize", "the cause"]
        assert "Handler" in caplog.text


class TestHooksOfAHandler:
    @pytest.mark.parametrize("case", HOOKS)
    def test_a_handler_learns_the_functions_name_and_whether_it_returned(self, case: str) -> None:
        fn, calls = HOOKS[case]
        handler = Recorded()
        assert outcome(record(fn, handler)) == {"raises": "x", "exits with 0": None}.get(case, 7)
        assert handler.calls == calls

    def test_a_success_that_cannot_be_recorded_is_not_a_failure_of_the_function(self, error_file: Path) -> None:
        class Handler(ErrorHandler):
            def record_success(self) -> None:
                raise OSError("no telemetry")

        with pytest.raises(OSError, match="no telemetry"):
            record(returns, Handler())()
        assert not error_file.exists()

    def test_the_report_shows_what_a_handler_knows_of_a_signal(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        asked: list[tuple[str, str]] = []

        class Handler(ErrorHandler):
            def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:
                asked.append((message, error_file))
                if len(asked) == 3:
                    raise RuntimeError("no driver")
                return f"{message}\nGPU 3: page fault\nGPU 4: reset"

        monkeypatch.setattr(errors, "get_error_handler", Handler)
        killed, failed = failure_at(tmp_path / "e.json", exitcode=-11), ProcessFailure(0, 1, 1, "")
        plain = str(ChildFailedError("x", {1: failed}))
        assert not asked and "GPU" not in plain
        error = ChildFailedError("x", {0: killed, 1: failed}, cause=0)
        lines = str(error).splitlines()
        assert asked == [(killed.message, str(tmp_path / "e.json"))]
        at = next(n for n, line in enumerate(lines) if line.startswith("  cause     : "))
        assert [line.strip() for line in lines[at + 1 : at + 3]] == ["GPU 3: page fault", "GPU 4: reset"]
        assert str(ChildFailedError("x", {0: killed})).count("GPU 3: page fault") == 1
        assert "GPU" not in str(ChildFailedError("x", {0: killed}))  # the third time it fails
        assert "no driver" in caplog.text
        assert error.failures[0].message == killed.message
