"""Error files and `record`, compared with torch's (the oracle), and in processes of their own."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.programs import run_python
from kit.stories.recorded import HOOKS, Recorded, outcome, raises, record_text, returns, written

from aelastic.errors import ChildFailedError, ProcessFailure, exit_code_of, record


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process's own error file, which does not exist yet."""
    path = tmp_path / "own.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    return path


@pytest.fixture(scope="module")
def torch_errors() -> Any:
    """torch's own module, the oracle."""
    import torch.distributed.elastic.multiprocessing.errors as module

    return module


def run(script: str, error_file: Path) -> subprocess.CompletedProcess[str]:
    return run_python("-c", script, TORCHELASTIC_ERROR_FILE=str(error_file))


@pytest.mark.parametrize("case", HOOKS)
def test_torchs_record_calls_the_same(case: str, torch_errors: Any) -> None:
    if not hasattr(torch_errors.ErrorHandler, "record_success"):
        pytest.skip("torch before 2.15")
    fn, _ = HOOKS[case]
    ours, theirs = Recorded(), Recorded()
    assert outcome(record(fn, ours)) == outcome(torch_errors.record(fn, theirs))
    assert ours.calls == theirs.calls


OURS = "from aelastic.errors import record, ChildFailedError, ProcessFailure\n"
THEIRS = "from torch.distributed.elastic.multiprocessing.errors import record, ChildFailedError, ProcessFailure\n"
WORKER = "@record\ndef main():\n    raise ValueError('batch is empty')\nmain()\n"


class TestTorch:
    @pytest.mark.parametrize("writer", [OURS, pytest.param(THEIRS, marks=pytest.mark.all)], ids=["ours", "torch's"])
    def test_either_reads_what_the_others_record_wrote(self, writer: str, tmp_path: Path, torch_errors: Any) -> None:
        assert run(writer + WORKER, tmp_path / "e.json").returncode == 1
        theirs = torch_errors.ProcessFailure(0, 1, 1, str(tmp_path / "e.json"))
        ours = ProcessFailure(0, 1, 1, str(tmp_path / "e.json"))
        assert theirs.message["message"] == ours.message == "ValueError: batch is empty"
        assert theirs.message["extraInfo"]["py_callstack"] == ours.traceback
        assert ours.traceback.endswith("ValueError: batch is empty\n")
        assert ours.headline == "ValueError: batch is empty at <string>:4"
        assert theirs.timestamp == ours.timestamp
        assert theirs.error_file_data == ours.error_file_data
        assert "batch is empty" in torch_errors.ChildFailedError("x", {0: theirs}).format_msg()

    def test_scrapers_of_torchs_report_find_their_fields(self, tmp_path: Path, torch_errors: Any) -> None:
        ours_at, theirs_at = tmp_path / "o.json", tmp_path / "t.json"
        ours_at.write_text(record_text())
        theirs_at.write_text(record_text("OSError: other"))
        failures = [ProcessFailure(0, 1, 1, str(path)) for path in (ours_at, theirs_at)]
        ours = ChildFailedError("x", dict(enumerate(failures)))
        theirs = torch_errors.ChildFailedError(
            "x", {n: torch_errors.ProcessFailure(0, 1, 1, str(path)) for n, path in enumerate([ours_at, theirs_at])}
        )

        def marks(report: str) -> list[str]:
            lines = report.strip("\n").split("\n")
            names = ("[", "  time ", "  host ", "  rank ", "  exitcode ", "  error_file", "  traceback ")
            kept = [line for line in lines if line.startswith(names) or line[:1] not in " V"]
            return [line.split(":")[0].strip("=-") for line in kept]

        assert marks(str(ours)) == marks(str(theirs))

    def test_torchs_child_failed_error_passes_our_record(
        self, tmp_path: Path, torch_errors: Any, error_file: Path
    ) -> None:
        (tmp_path / "child.json").write_text(record_text())

        def fails(path: str) -> Callable[[], None]:
            def main() -> None:
                raise torch_errors.ChildFailedError("x", {0: torch_errors.ProcessFailure(0, 1, -9, path)})

            return record(main)

        with pytest.raises(torch_errors.ChildFailedError) as raised:
            fails(str(tmp_path / "child.json"))()
        assert exit_code_of(raised.value) == 137
        assert written(error_file)["message"]["errorCode"] == -9
        assert written(error_file)["message"]["message"] == "ValueError: batch is empty"
        with pytest.raises(torch_errors.ChildFailedError):
            fails("/none")()
        assert written(error_file)["message"]["message"].startswith("killed by signal 9")

    @pytest.mark.parametrize("is_old", [False, True], ids=["this torch", "torch before 2.15"])
    def test_torchs_handler_may_be_given_to_our_record(
        self, torch_errors: Any, error_file: Path, monkeypatch: pytest.MonkeyPatch, is_old: bool
    ) -> None:
        for hook in ("set_entrypoint_fn_name", "record_success") if is_old else ():
            monkeypatch.delattr(torch_errors.ErrorHandler, hook, raising=False)
        assert record(returns, torch_errors.ErrorHandler())() == 7
        with pytest.raises(ValueError, match="x"):
            record(raises, torch_errors.ErrorHandler())()
        assert written(error_file)["message"]["message"] == "ValueError: x"
        with pytest.raises(ChildFailedError):
            record(_fail_without_a_file, torch_errors.ErrorHandler())()

    def test_a_fatal_signal_under_record_shows_where_python_stood(self, tmp_path: Path) -> None:
        done = run(OURS + "import ctypes\n@record\ndef main():\n    ctypes.string_at(0)\nmain()\n", tmp_path / "e.json")
        failure = ProcessFailure(0, 1, done.returncode, str(tmp_path / "e.json"), stderr_tail=done.stderr)
        assert failure.signal_name() == "SIGSEGV"
        assert failure.message.endswith("last output: Fatal Python error: Segmentation fault")
        assert "in main" in failure.traceback


def _fail_without_a_file() -> None:
    raise ChildFailedError("x", {0: ProcessFailure(0, 1, 1, "")})
