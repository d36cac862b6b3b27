"""Tracebacks of real scripts, as `failures.exit_reason` reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from aelastic.failures.exit_reason import Cause, last_exception, last_line


def found(text: str) -> Cause:
    cause = last_exception(text)
    assert cause is not None
    return cause


def end_of(tmp_path: Path, script: str, *options: str) -> tuple[int, str]:
    """Runs a script and answers its exit code and what it printed to stderr."""
    path = tmp_path / "train.py"
    path.write_text(script)
    done = subprocess.run([sys.executable, *options, str(path)], capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


class TestRealScripts:
    def test_a_plain_exception_is_found_with_its_line(self, tmp_path: Path) -> None:
        script = "def main():\n    raise ValueError('batch is empty')\n\nmain()\n"
        code, stderr = end_of(tmp_path, script)
        assert (code, found(stderr)) == (
            1,
            Cause("ValueError: batch is empty", stderr.rstrip("\n"), str(tmp_path / "train.py"), 2),
        )

    @pytest.mark.parametrize("how", ["raise RuntimeError('no data') from error", "raise RuntimeError('no data')"])
    def test_chained_exceptions_are_one_traceback_named_after_the_last(self, tmp_path: Path, how: str) -> None:
        script = f"try:\n    {{}}['lr']\nexcept KeyError as error:\n    {how}\n"
        cause = found(end_of(tmp_path, script)[1])
        assert (cause.headline, cause.line) == ("RuntimeError: no data", 4)
        assert "KeyError: 'lr'" in cause.traceback
        assert cause.traceback.count("Traceback") == 2

    def test_a_syntax_error_in_the_script_itself_has_no_header(self, tmp_path: Path) -> None:
        _, stderr = end_of(tmp_path, "x = 1\ndef main(:\n    pass\n")
        assert "Traceback" not in stderr
        cause = found(stderr)
        assert (cause.headline, cause.file, cause.line) == (
            "SyntaxError: invalid syntax",
            str(tmp_path / "train.py"),
            2,
        )

    def test_a_syntax_error_in_an_imported_module_is_placed_in_that_module(self, tmp_path: Path) -> None:
        (tmp_path / "model.py").write_text("\n\nclass:\n")
        cause = found(end_of(tmp_path, "import model\n")[1])
        assert (cause.headline, Path(cause.file).name, cause.line) == ("SyntaxError: invalid syntax", "model.py", 3)

    def test_a_missing_module_is_named(self, tmp_path: Path) -> None:
        cause = found(end_of(tmp_path, "import no_such_module_here\n")[1])
        assert cause.headline == "ModuleNotFoundError: No module named 'no_such_module_here'"

    def test_a_segmentation_fault_is_placed_where_python_stood(self, tmp_path: Path) -> None:
        script = "import ctypes\n\ndef main():\n    ctypes.string_at(0)\n\nmain()\n"
        code, stderr = end_of(tmp_path, script, "-X", "faulthandler")
        cause = found(stderr)
        assert (code, cause.headline) == (-11, "Fatal Python error: Segmentation fault")
        assert Path(cause.file).name == "__init__.py"
        assert "line 4 in main" in cause.traceback

    def test_an_exit_without_a_traceback_has_no_cause(self, tmp_path: Path) -> None:
        code, stderr = end_of(tmp_path, "import sys\nprint('giving up', file=sys.stderr)\nsys.exit(3)\n")
        assert (code, last_exception(stderr), last_line(stderr)) == (3, None, "giving up")

    def test_an_interrupt_is_a_cause(self, tmp_path: Path) -> None:
        _, stderr = end_of(tmp_path, "raise KeyboardInterrupt\n")
        assert found(stderr).headline == "KeyboardInterrupt"

    def test_an_exception_group_names_the_first_exception_in_it(self, tmp_path: Path) -> None:
        script = (
            "def bad():\n    raise TypeError('first')\n"
            "errors = []\ntry:\n    bad()\nexcept TypeError as e:\n    errors.append(e)\n"
            "raise ExceptionGroup('two of them', [ExceptionGroup('inner', errors), ValueError('second')])\n"
        )
        cause = found(end_of(tmp_path, script)[1])
        assert cause.headline == "ExceptionGroup: two of them (2 sub-exceptions), first TypeError: first"
        assert cause.line == 2
        assert "ValueError: second" in cause.traceback

    def test_a_message_of_several_lines_and_notes_is_kept(self, tmp_path: Path) -> None:
        script = "e = ValueError('shapes differ:\\n  a: 3\\n\\n  b: 4')\ne.add_note('seen in layer 7')\nraise e\n"
        cause = found(end_of(tmp_path, script)[1])
        assert cause.headline == "ValueError: shapes differ:  a: 3".replace("  ", " ")
        assert cause.traceback.endswith("  b: 4\nseen in layer 7")

    def test_what_happens_while_python_shuts_down_is_not_the_cause(self, tmp_path: Path) -> None:
        script = (
            "class Loader:\n    def __del__(self):\n        raise OSError('too late')\n\n"
            "loader = Loader()\nraise ValueError('the cause')\n"
        )
        _, stderr = end_of(tmp_path, script)
        assert stderr.index("OSError: too late") > stderr.index("ValueError: the cause")
        assert found(stderr).headline == "ValueError: the cause"

    def test_a_thread_that_died_is_the_cause_only_where_nothing_else_is(self, tmp_path: Path) -> None:
        thread = "import threading, sys\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()\n"
        assert found(end_of(tmp_path, thread + "sys.exit(1)\n")[1]).headline == "ZeroDivisionError: division by zero"
        both = (
            "import atexit\n" + thread.replace("t.start()\nt.join()", "atexit.register(t.run)") + "raise KeyError(1)\n"
        )
        assert found(end_of(tmp_path, both)[1]).headline == "KeyError: 1"

    def test_a_deep_recursion_is_read_to_its_end(self, tmp_path: Path) -> None:
        cause = found(end_of(tmp_path, "def f(n):\n    return f(n + 1)\n\nf(0)\n")[1])
        assert (cause.headline, cause.line) == ("RecursionError: maximum recursion depth exceeded", 2)
