"""What is imported at the start of an agent, and what is not: a start pays for what it uses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = r"(torch|aiohttp|numpy)\b"
# What a failure needs is imported while the workers start, or later.
OF_A_FAILURE = r"aelastic\.failures\.(exit_reason|report)\b"


@pytest.mark.parametrize(
    "imported, absent",
    [
        ("aelastic", rf"{HEAVY}|aelastic\."),  # a program pays for the names that it takes
        ("aelastic.supervisor", HEAVY),
        ("aelastic.cli.main", HEAVY),
        ("aelastic.cli.main, aelastic.supervisor", OF_A_FAILURE),
        ("aelastic.rdzv.registry", rf"{HEAVY}|.*\.boards\."),  # each back end is imported by its users
    ],
)
def test_an_import_pulls_in_no_more_than_is_used(imported: str, absent: str) -> None:
    code = f"import {imported}, re, sys; print([name for name in sys.modules if re.match({absent!r}, name)])"

    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)

    assert seen.stdout == "[]\n"


def test_a_timeline_is_drawn_without_torch_and_without_an_event_loop() -> None:
    code = "import sys; from aelastic.timeline.command import main; main(['nowhere']); "
    code += "print({'torch', 'asyncio', 'anyio', 'aiohttp'} & set(sys.modules))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert seen.stdout == "set()\n" and seen.stderr.startswith("aelastic.timeline: error: nowhere: no such file")


@pytest.mark.all
def test_asking_torch_does_not_import_it_here(script: str) -> None:
    code = (
        "import os, sys; from aelastic.cli.arguments import parse\n"
        f"parse(['--nproc-per-node=auto', {script!r}], os.environ)\n"
        "assert 'torch' not in sys.modules and 'asyncio' not in sys.modules, sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# What `python -m` itself imports before the package it is asked to run: these are out of anyone's reach.
BEFORE = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"


@pytest.fixture
def shadows(tmp_path: Path) -> Path:
    """A folder with a file for each module of the standard library and of what an agent uses; each ends its importer."""
    folder = tmp_path / "shadows"
    folder.mkdir()
    (folder / "ours.py").write_text(BEFORE)
    before = subprocess.run(
        [sys.executable, "-m", "ours"], cwd=folder, capture_output=True, text=True, check=True, timeout=60
    ).stdout.split()
    for name in {*sys.stdlib_module_names, "anyio", "uvloop", "aiofiles", "aiohttp", "torch"} - {*before, "__future__"}:
        (folder / f"{name}.py").write_text(f"import os\nos.write(2, b'{name} of the folder')\nos._exit(55)\n")
    return folder


@pytest.mark.cold
@pytest.mark.parametrize("module", ["aelastic", "aelastic.run"])
def test_the_modules_of_the_working_folder_are_not_the_agents(shadows: Path, tmp_path: Path, module: str) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint(sys.path[0])\nraise ValueError('boom')\n")
    command = [sys.executable, "-m", module, "--max-restarts=1", "--tee=3", str(tmp_path / "train.py")]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "TORCHELASTIC_HEALTH_CHECK_PORT": "0"}
    env["TMPDIR"] = str(tmp_path)  # what --tee keeps goes with the test
    done = subprocess.run(command, cwd=shadows, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "ValueError: boom" in done.stderr, done.stderr
    assert "of the folder" not in done.stderr
    assert done.stdout.count(f"[default0]:{tmp_path}\n") == 2


@pytest.mark.cold
@pytest.mark.parametrize("command", ["aelastic.under -c print('ran')", "aelastic.under.deepspeed --world_info=None x"])
def test_neither_are_they_those_of_what_puts_aelastic_under_a_program(shadows: Path, command: str) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=shadows,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout == "ran\n") or "it should be what DeepSpeed's runner makes" in done.stderr
    assert "of the folder" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.cold
@pytest.mark.parametrize("options", ["-m train", "--run-path train.py", "--run-path --start-method=fork train.py"])
def test_the_workers_look_into_the_working_folder_first(tmp_path: Path, options: str) -> None:
    (tmp_path / "train.py").write_text("import sys\nprint('path', sys.path[0])\n")
    command = [sys.executable, "-m", "aelastic", *options.split()]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, f"path {tmp_path}\n"), done.stderr


# Interrupts its process when a module is looked for the first time: a Ctrl-C at that moment.
INTERRUPT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == os.environ["INTERRUPT_AT"]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""


@pytest.mark.cold
@pytest.mark.parametrize("moment", ["typing", "aelastic.errors", "argparse"])
@pytest.mark.parametrize("command", ["-m aelastic", "-m aelastic.timeline", "bin/aelastic"])
def test_a_ctrl_c_during_the_imports_says_nothing(tmp_path: Path, moment: str, command: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPT)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "aelastic").write_text("from aelastic.cli.main import main_and_exit\nmain_and_exit()\n")
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[2]}", "INTERRUPT_AT": moment}
    done = subprocess.run(
        [sys.executable, *command.split(), "--version"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("command", ["ok.py", "doctor"])
def test_a_package_that_is_missing_is_named_with_what_to_install(tmp_path: Path, command: str) -> None:
    package = "anyio"
    code = f"import runpy, sys; sys.modules[{package!r}] = None; runpy.run_module('aelastic', run_name='__main__')"
    (tmp_path / "ok.py").touch()
    done = subprocess.run(
        [sys.executable, "-c", code, command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    words = f"aelastic: error: {package} is not installed for {sys.executable}: pip install {package} (see "
    assert (done.returncode, done.stderr.startswith(words), done.stderr.count("\n")) == (2, True, 1), done.stderr


@pytest.mark.parametrize(
    "prelude, is_seen", [("", True), ("import logging; logging.basicConfig(level='ERROR')\n", False)]
)
def test_a_restart_is_seen_in_a_program_that_has_configured_no_logging(
    tmp_path: Path, prelude: str, is_seen: bool
) -> None:
    (tmp_path / "fails_once.py").write_text(
        "import os, sys; sys.exit(os.environ['TORCHELASTIC_RESTART_COUNT'] == '0')\n"
    )
    code = f"{prelude}import aelastic.run as m; m.main(['--max-restarts=1', 'fails_once.py'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert ("aelastic: W restarting worker group: rank 0 failed" in done.stderr) is is_seen
    assert "aelastic: I" not in done.stderr
