"""Bad input, as users see it: one line on stderr, exit code 2, nothing started, nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kit.launching import Launcher
from kit.programs import ROOT, run_python
from kit.verbs import json_of
from kit.waiting import wait_for

# The script would create this file, and none of these runs may leave it.
SCRIPT = "import pathlib; pathlib.Path('started').touch()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working folder with the files that the command lines below name, and an empty `tmp`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    return tmp_path


def aelastic(folder: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", "aelastic", *argv, folder=folder, **{"TMPDIR": str(folder / "tmp"), **environ})


def contents(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


REFERS = re.compile(r" \((see aelastic( \w+)? --help|see aelastic --help-all|help: [a-z0-9-]+)\)\n$")


def assert_refused(folder: Path, expected: str, *argv: str, **environ: str) -> None:
    before = contents(folder)
    run = aelastic(folder, *argv, **environ)
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    assert run.stderr.startswith("aelastic: error: ") and REFERS.search(run.stderr)
    assert run.stderr.count("\n") == 1
    assert expected in run.stderr
    assert contents(folder) == before


# One of each kind; `core/test_bad_usage.py` tests the others in one process.
@pytest.mark.parametrize(
    "command, environ, expected",
    [
        ("", {}, "no script given"),
        ("--cache-dir /proc/none train.py", {}, "cache_dir /proc/none: "),  # by the supervisor
        ("train.py", {"PET_RDZV_ID": "a\nb"}, "use a run id without line breaks"),
    ],
)
def test_bad_input_is_refused_in_one_line(folder: Path, command: str, environ: dict[str, str], expected: str) -> None:
    assert_refused(folder, expected, *command.split(), **environ)


def has_device(kind: str) -> bool:
    return run_python("-c", f"import torch; print(int(torch.{kind}.is_available()))").stdout.strip() == "1"


@pytest.mark.all
@pytest.mark.parametrize("word, kind", [("gpu", "cuda"), ("xpu", "xpu")])
def test_devices_that_are_not_there_are_refused(folder: Path, word: str, kind: str) -> None:
    if has_device(kind):
        pytest.skip(f"this machine has {kind} devices")
    assert_refused(folder, "torch sees no such device here", "--nproc-per-node", word, "train.py")


def test_the_scripts_of_the_refused_command_lines_would_run(folder: Path) -> None:
    run = aelastic(folder, "--standalone", "train.py")
    assert run.returncode == 0, run.stderr
    assert (folder / "started").exists()


def test_help_and_version_go_to_stdout_and_import_no_event_loop(folder: Path) -> None:
    code = (
        "import sys; from aelastic.cli.main import main\n"
        "assert main(['--help']) == main(['--version']) == 0\n"
        "assert not {'asyncio', 'uvloop', 'anyio', 'torch'} & set(sys.modules)"
    )
    run = run_python("-c", code, folder=folder)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("Start, watch and restart ") and "\naelastic 0." in run.stdout


def test_an_unread_or_closed_stream_does_not_change_the_exit_code(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for redirection, command, code in (("2>&-", "missing.py", 2), (">&-", "--version", 0), ("| true", "--help", 0)):
        shell = f"set -o pipefail; {sys.executable} -m aelastic {command} {redirection}"
        run = subprocess.run(["bash", "-c", shell], cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (code, ""), redirection


# Shell completion.

COMPLETE = """\
source ./script
complete_it() {
    COMP_WORDS=(aelastic "$@") COMP_CWORD=$#
    _shtab_aelastic
    echo "${COMPREPLY[*]}"
}
complete_it --rdzv-e
complete_it --numa-binding e
complete_it --tee 3 tr
"""


def test_bash_completes_options_their_words_and_the_script(folder: Path) -> None:
    pytest.importorskip("shtab")
    printed = aelastic(folder, "--print-completion", "bash")
    assert (printed.returncode, printed.stderr) == (0, "")
    (folder / "script").write_text(printed.stdout)
    run = subprocess.run(["bash", "-c", COMPLETE], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.splitlines() == ["--rdzv-endpoint", "exclusive", "train.py"]


COMMANDS_AND_JOBS = """\
source ./script
complete_it() {
    COMP_WORDS=(aelastic "$@") COMP_CWORD=$#
    _shtab_aelastic
    echo "$*: ${COMPREPLY[*]}"
}
complete_it st
complete_it tr
complete_it train.py --x ""
complete_it status --j
complete_it status ""
complete_it stop res
complete_it logs 0 --job r
complete_it why ""
complete_it policy ""
complete_it policy explain t
complete_it help ver
complete_it rehearse --checkp
complete_it doctor --rdzv-e
"""
COMPLETED = """\
st: status stacks stop
tr: train.py
train.py --x : train.py
status --j: --job --json
status : resnet
stop res: resnet
logs 0 --job r: resnet
why : ended resnet train.py
policy : explain
policy explain t: train.py
help ver: version
rehearse --checkp: --checkpoints
doctor --rdzv-e: --rdzv-endpoint
"""


@pytest.mark.all
@pytest.mark.ci
def test_bash_completes_commands_their_options_and_the_names_of_jobs(launch: Launcher) -> None:
    pytest.importorskip("shtab")
    env = {"XDG_RUNTIME_DIR": str(launch.folder)}
    assert launch("", "--rdzv-id=ended", env=env).wait() == 0
    # A shell would execute the command in this name.
    for number, run_id in enumerate(("resnet", "$(touch executed)"), 1):
        launch("rest()", f"--rdzv-id={run_id}", name=f"job{number}", env=env)
        wait_for(f"{number} jobs", lambda: len(json_of(launch.folder, "ps").get("jobs", ())) == number)  # noqa: B023
    folder = launch.folder / "shell"
    folder.mkdir()
    script = aelastic(folder, "--print-completion", "bash").stdout
    (folder / "train.py").touch()
    command = ["bash", "-c", COMMANDS_AND_JOBS.replace("source ./script", script)]
    environ = {**os.environ, **env, "PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert run.stdout == COMPLETED, run.stderr
    assert [path.name for path in folder.iterdir()] == ["train.py"]


def test_names_of_jobs_are_found_without_what_takes_time_to_import(folder: Path) -> None:
    code = (
        "import sys; from aelastic.cli.shells import job_names\n"
        "assert job_names.main(['--ended']) == 0\n"
        "assert not {'argparse', 'asyncio', 'anyio', 'uvloop', 'torch'} & set(sys.modules)"
    )
    run = run_python("-c", code, folder=folder, XDG_RUNTIME_DIR=str(folder))
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_each_shell_that_torchrun_knows_gets_its_script(folder: Path) -> None:
    shtab = pytest.importorskip("shtab")
    for shell in ("zsh", "fish", "tcsh", "powershell"):
        printed = aelastic(folder, "--print-completion", shell)
        if shell in shtab.SUPPORTED_SHELLS:
            assert (printed.returncode, printed.stderr) == (0, "")
            assert all(word in printed.stdout for word in ("rdzv-endpoint", "uncordon", "at-save")), shell
            assert ("aelastic.cli.shells.job_names" in printed.stdout) == (shell in {"zsh", "fish"})
        else:
            assert printed.returncode == 2
            assert f"--print-completion {shell}: this shtab cannot: pip install --upgrade shtab" in printed.stderr


def test_completion_without_shtab_names_what_to_install(folder: Path) -> None:
    (folder / "without").mkdir()
    (folder / "without" / "shtab.py").write_text("raise ImportError")
    python_path = f"{folder / 'without'}:{ROOT}"
    message = "--print-completion zsh: shtab is not installed: pip install shtab"
    run = aelastic(folder, "--print-completion", "zsh", PYTHONPATH=python_path)
    assert (run.returncode, run.stdout) == (2, "")
    assert message in run.stderr
    assert "--print-completion nosh: use one of bash, zsh" in aelastic(folder, "--print-completion", "nosh").stderr
