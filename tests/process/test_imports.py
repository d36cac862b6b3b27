"""What an agent imports at its start, and what it must not: a start only pays for what it uses."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest
from kit.launching import Launcher
from kit.programs import ROOT, run_python

pytestmark = pytest.mark.cold

HEAVY = r"(torch|aiohttp|numpy)\b"
# Imported while the workers start or later, as only failures need these.
OF_A_FAILURE = r"aelastic\.failures\.(exit_reason|report)\b"
PARSE_AUTO = (
    "import os; from aelastic.cli.arguments import parse; parse(['--nproc-per-node=auto', 'train.py'], os.environ)"
)


# Imports of one interpreter, step by step, and the modules that must be absent after each step.
STAGES = (
    ("import aelastic", rf"{HEAVY}|aelastic\."),  # a program pays only for the names that it uses
    ("import aelastic.rdzv.registry", rf"{HEAVY}|.*\.stores\."),  # each back end is imported when it is used
    ("import aelastic.cli.main, aelastic.supervisor", rf"{HEAVY}|{OF_A_FAILURE}"),
)


def imported(code: str, absent: str) -> str:
    """Code that runs `code`, then prints the loaded modules that should be absent."""
    return f"{code}; print([name for name in sys.modules if re.match({absent!r}, name)])"


def test_what_agents_and_programs_import_pulls_in_no_more(tmp_path: Path) -> None:
    stages = "\n".join(imported(code, absent) for code, absent in STAGES)
    seen = run_python("-s", "-c", f"import re, sys\n{stages}", folder=tmp_path)
    assert (seen.returncode, seen.stdout.splitlines()) == (0, ["[]"] * len(STAGES)), seen.stderr


@pytest.mark.parametrize(
    "code, absent",
    [
        ("from aelastic.cli.timeline import main; main(['nowhere'])", rf"{HEAVY}|(asyncio|anyio)\b"),
        pytest.param(PARSE_AUTO, rf"{HEAVY}|asyncio\b", marks=pytest.mark.all),  # torch is asked, in another process
        # A worker imports `record` before its own modules.
        ("import aelastic.errors", rf"{HEAVY}|{OF_A_FAILURE}|(anyio|asyncio|socket|traceback|logging|json|pathlib)$"),
    ],
)
def test_what_is_used_pulls_in_no_more(tmp_path: Path, code: str, absent: str) -> None:
    (tmp_path / "train.py").touch()
    options = "-S" if code.endswith("errors") else "-s"
    seen = run_python(options, "-c", f"import re, sys; {imported(code, absent)}", folder=tmp_path)
    assert (seen.returncode, seen.stdout) == (0, "[]\n"), seen.stderr


WATCHES = (
    r"aelastic\.(hangs\.(activity|hang_rules)|health\.server|observe\.(status|event_log)\b|failures\.report)|aiohttp\b"
)


def test_a_job_that_asks_for_nothing_imports_nothing_that_watches_or_answers(launch: Launcher) -> None:
    wrapper = f"""
        import atexit, re, sys
        atexit.register(lambda: print([m for m in sys.modules if re.match({WATCHES!r}, m)], file=sys.stderr))
    """
    job = launch("say('start')", env={"TORCHELASTIC_HEALTH_CHECK_PORT": ""}, wrapper=wrapper)
    assert job.wait() == 0
    assert job.stderr.splitlines() == ["[]"]


@pytest.fixture
def shadows(tmp_path: Path) -> Path:
    """A folder with a file for each standard module and each dependency of an agent; importing one ends the process."""
    folder = tmp_path / "shadows"
    folder.mkdir()
    # Python imports some modules before the module or code that it runs (since 3.13, `linecache` for `-c`): nobody can
    # stop it from loading those from the working folder.
    look = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    (folder / "ours.py").write_text(look)
    before = {"__future__"}
    for asked in (("-m", "ours"), ("-c", look)):
        before.update(run_python(*asked, folder=folder).stdout.split())
    for name in {*sys.stdlib_module_names, "anyio", "uvloop", "aiofiles", "aiohttp", "torch"} - before:
        (folder / f"{name}.py").write_text(f"import os\nos.write(2, b'{name} of the folder')\nos._exit(55)\n")
    return folder


@pytest.mark.parametrize("module", ["aelastic", "aelastic.run"])
def test_the_modules_of_the_working_folder_are_not_the_agents(shadows: Path, tmp_path: Path, module: str) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.path[0])\nraise ValueError('boom')\n")
    options = "-m", module, "--max-restarts=1", "--tee=3", str(tmp_path / "train.py")
    # The files that --tee keeps are removed with the test.
    done = run_python(*options, folder=shadows, TORCHELASTIC_HEALTH_CHECK_PORT="0", TMPDIR=str(tmp_path))
    assert done.returncode == 1 and "ValueError: boom" in done.stderr, done.stderr
    assert "of the folder" not in done.stderr
    assert done.stdout.count(f"[default0]:{tmp_path}\n") == 2


@pytest.mark.parametrize("command", ["aelastic.under -c print('ran')", "aelastic.under.deepspeed --world_info=None x"])
def test_neither_are_they_those_of_what_puts_aelastic_under_a_program(shadows: Path, command: str) -> None:
    done = run_python("-m", *command.split(), folder=shadows)
    assert (done.stdout == "ran\n") or "use the value that DeepSpeed's runner passes" in done.stderr
    assert "of the folder" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        "-m train",
        "--run-path train.py",
        pytest.param("--run-path --start-method=fork train.py", marks=pytest.mark.all),
    ],
)
def test_the_workers_look_into_the_working_folder_first(tmp_path: Path, options: str) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('path', sys.path[0])\n")
    done = run_python("-m", "aelastic", *options.split(), folder=tmp_path)
    assert (done.returncode, done.stdout) == (0, f"path {tmp_path}\n"), done.stderr


# Interrupts its process at the first lookup of a module, like Ctrl-C at that moment.
INTERRUPT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""
MOMENTS = ("typing", "aelastic.errors", "argparse")
COMMANDS = ("-m aelastic", "-m aelastic.timeline", "bin/aelastic")


@pytest.mark.parametrize(
    "command, moment",
    [
        pytest.param(command, moment, marks=[] if COMMANDS.index(command) == at else pytest.mark.all)
        for at, moment in enumerate(MOMENTS)
        for command in COMMANDS
    ],
)
def test_a_ctrl_c_during_the_imports_says_nothing(tmp_path: Path, moment: str, command: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "aelastic").write_text("from aelastic.cli.main import main_and_exit\nmain_and_exit()\n")
    python_path = f"{tmp_path}:{ROOT}"
    done = run_python(*command.split(), "--version", folder=tmp_path, PYTHONPATH=python_path, INTERRUPT_AT=moment)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("command", ["ok.py", "doctor"])
def test_a_package_that_is_missing_is_named_with_what_to_install(tmp_path: Path, command: str) -> None:
    code = "import runpy, sys; sys.modules['anyio'] = None; runpy.run_module('aelastic', run_name='__main__')"
    (tmp_path / "ok.py").touch()
    done = run_python("-c", code, command, folder=tmp_path)
    words = f"aelastic: error: anyio is not installed for {sys.executable}: pip install anyio (help: a-package-is-not-installed)\n"
    assert (done.returncode, done.stderr) == (2, words)


@pytest.mark.parametrize(
    "prelude, is_seen", [("", True), ("import logging; logging.basicConfig(level='ERROR')\n", False)]
)
def test_a_restart_is_seen_in_a_program_that_has_configured_no_logging(
    tmp_path: Path, prelude: str, is_seen: bool
) -> None:
    fails_once = "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    (tmp_path / "fails_once.py").write_text(fails_once)
    code = f"{prelude}import aelastic.run as m; m.main(['--max-restarts=1', 'fails_once.py'])"
    done = run_python("-c", code, folder=tmp_path)
    assert done.returncode == 0
    assert ("aelastic: W restarting worker group: rank 0 failed" in done.stderr) is is_seen
    assert "aelastic: I" not in done.stderr
