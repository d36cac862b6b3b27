"""Tracebacks of real scripts, as `diagnose.failures.exit_reason` reads them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from kit.launching import ran

from aelastic.diagnose.failures.exit_reason import last_exception, last_line

THREAD = "import threading, sys\nt = threading.Thread(target=lambda: 1 / 0)\n"
ZERO = "ZeroDivisionError: division by zero"


def end_of(tmp_path: Path, script: str) -> tuple[int, str]:
    """Runs a script; returns its exit code and its stderr."""
    path = tmp_path / "train.py"
    path.write_text(script)
    done = ran(sys.executable, "-X", "faulthandler", str(path))
    return done.returncode, done.stderr


WHOLE = "all that was written"
# Each script, its message, the line that the message names (0: none), and another part of the traceback.
SCRIPTS: dict[str, tuple[str, str, int, str]] = {
    "a plain exception": (
        "def main():\n    raise ValueError('batch is empty')\n\nmain()\n", "ValueError: batch is empty", 2, WHOLE,
    ),
    "an exception raised from another": (
        "try:\n    {}['lr']\nexcept KeyError as error:\n    raise RuntimeError('no data') from error\n",
        "RuntimeError: no data", 4, "KeyError: 'lr'",
    ),
    "an exception while another is handled": (
        "try:\n    {}['lr']\nexcept KeyError as error:\n    raise RuntimeError('no data')\n",
        "RuntimeError: no data", 4, "KeyError: 'lr'",
    ),
    "a syntax error, which has no header": ("x = 1\ndef main(:\n    pass\n", "SyntaxError: invalid syntax", 2, ""),
    "a syntax error in a module": ("import model\n", "SyntaxError: invalid syntax", 0, "model.py"),
    "a missing module": ("import no_such\n", "ModuleNotFoundError: No module named 'no_such'", 1, ""),
    "a segmentation fault": (
        "import ctypes\n\ndef main():\n    ctypes.string_at(0)\n\nmain()\n",
        "Fatal Python error: Segmentation fault", 0, "line 4 in main",
    ),
    "an interrupt": ("raise KeyboardInterrupt\n", "KeyboardInterrupt", 1, ""),
    "an exception group is named after the first in it": (
        ("def bad():\n    raise TypeError('first')\n"
        "errors = []\ntry:\n    bad()\nexcept TypeError as e:\n    errors.append(e)\n"
        "raise ExceptionGroup('two of them', [ExceptionGroup('inner', errors), ValueError('second')])\n"),
        "ExceptionGroup: two of them (2 sub-exceptions), first TypeError: first", 2, "ValueError: second",
    ),
    "a message of several lines, and notes": (
        "e = ValueError('shapes differ:\\n  a: 3\\n\\n  b: 4')\ne.add_note('seen in layer 7')\nraise e\n",
        "ValueError: shapes differ: a: 3", 3, WHOLE,
    ),
    "what happens while Python shuts down is not the cause": (
        ("class Loader:\n    def __del__(self):\n        raise OSError('too late')\n\n"
        "loader = Loader()\nraise ValueError('the cause')\n"),
        "ValueError: the cause", 6, "",
    ),
    "a thread that died, and nothing else": (f"{THREAD}t.start()\nt.join()\nsys.exit(1)\n", ZERO, 2, ""),
    "a thread that died, and the main one": (f"{THREAD}import atexit; atexit.register(t.run)\nraise KeyError(1)\n", "KeyError: 1", 4, ""),
    "a deep recursion": ("def f(n):\n    return f(n + 1)\n\nf(0)\n", "RecursionError: maximum recursion depth exceeded", 2, ""),
}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_cause_of_a_real_scripts_end_is_found(name: str, tmp_path: Path) -> None:
    script, headline, line, more = SCRIPTS[name]
    (tmp_path / "model.py").write_text("\n\nclass:\n")
    _, stderr = end_of(tmp_path, script)
    cause = last_exception(stderr)
    assert cause is not None and cause.headline == headline, stderr
    assert (cause.file, cause.line) == (str(tmp_path / "train.py"), line) or not line
    assert cause.traceback == stderr.rstrip("\n") if more == WHOLE else more in cause.traceback


def test_an_exit_without_a_traceback_has_no_cause(tmp_path: Path) -> None:
    code, stderr = end_of(tmp_path, "import sys\nprint('giving up', file=sys.stderr)\nsys.exit(3)\n")
    assert (code, last_exception(stderr), last_line(stderr)) == (3, None, "giving up")
