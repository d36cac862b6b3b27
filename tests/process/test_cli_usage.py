"""Bad input, as its user sees it: one line on stderr, exit code 2, nothing started, nothing left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# What is started says so, in a file that none of these runs may leave.
SCRIPT = "import pathlib; pathlib.Path('started').touch()\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The working folder, with what the command lines below name, and an empty `tmp`."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "tmp").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "a-file").touch()
    return tmp_path


def aelastic(folder: Path, *argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "AELASTIC_"))}
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-m", "aelastic", *argv],
        cwd=folder,
        env={**clean, "PYTHONPATH": root, "TMPDIR": str(folder / "tmp"), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def contents(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def assert_refused(folder: Path, said: str, *argv: str, **environ: str) -> None:
    before = contents(folder)
    run = aelastic(folder, *argv, **environ)
    assert (run.returncode, run.stdout) == (2, ""), run.stderr
    assert run.stderr.startswith("aelastic: error: ") and run.stderr.endswith(" (see python -m aelastic --help)\n")
    assert run.stderr.count("\n") == 1
    assert said in run.stderr
    assert contents(folder) == before


@pytest.mark.parametrize(
    "command, said",
    [
        ("", "no script given"),
        ("--nproc-per-node 2", "no script given"),
        ("--bogus", "unknown option --bogus"),
        ("--max-restrats=3 train.py", "did you mean --max-restarts?"),
        ("--nproc=2 train.py", "ambiguous option"),
        ("--max-restarts", "expected one argument"),
        ("--max-restarts x train.py", "--max-restarts x: use a whole number"),
        ("--max-restarts -1 train.py", "--max-restarts -1: use 0 or more"),
        ("--nproc-per-node 0 train.py", "--nproc-per-node 0: at least 1 worker is needed"),
        ("--nproc-per-node -2 train.py", "at least 1 worker is needed"),
        ("--nproc-per-node many train.py", "use a number of workers, or auto, cpu, gpu or xpu"),
        ("--nnodes 1:2 train.py", "static takes a fixed number of nodes, not 1:2"),
        ("--nnodes two train.py", "a range MIN:MAX"),
        ("--nnodes 3:2 train.py", "the minimum 3 is above the maximum 2"),
        ("--nnodes 0 train.py", "at least 1 node is needed"),
        ("--nnodes 1:1:1 train.py", "a range MIN:MAX"),
        ("--standalone --nnodes 2 train.py", "--standalone is one node on its own"),
        ("--rdzv-backend= train.py", "use a name"),
        ("--rdzv-backend etcdv3 train.py", "--rdzv-backend etcdv3: no such back end: did you mean etcd-v3?"),
        ("--nnodes 2 --rdzv-backend c10d train.py", "c10d needs --rdzv-endpoint HOST:PORT: the same on every node"),
        ("--rdzv-endpoint host train.py", "the port is missing: use host:PORT"),
        ("--ui big train.py", "--ui big: use one of auto, line, view, off"),
        ("--rdzv-conf a train.py", "--rdzv-conf a: a has no value: use a=value"),
        ("--rdzv-conf =a train.py", "use key=value pairs, separated by commas"),
        ("--node-rank 1 --master-port 29511 train.py", "--node-rank 1: one node has rank 0"),
        ("--node-rank x train.py", "--node-rank x: use a whole number"),
        ("--nnodes 2 --node-rank 2 train.py", "node rank is 2 with 2 nodes"),
        ("--local-addr= train.py", "use a host name or an address"),
        ("--numa-binding near train.py", "--numa-binding near: use one of node, socket, exclusive, core-complex"),
        ("--local-ranks-filter 0,x train.py", "--local-ranks-filter 0,x: use local ranks separated by commas"),
        ("--event-log-handler loud train.py", "event log handler 'loud' is not known to torch: use one of console, "),
        ("--logs-specs loud train.py", "--logs-specs loud: no installed package has it"),
        ("--monitor-interval 0 train.py", "use seconds above 0"),
        ("--shutdown-timeout nan train.py", "use seconds, 0 or more"),
        ("--shutdown-timeout -1 train.py", "use seconds, 0 or more"),
        ("--shutdown-timeout soon train.py", "use a number of seconds"),
        ("--start-method thread train.py", "use one of spawn, fork, forkserver"),
        ("--signals-to-handle SIGTERM,SIGNAL train.py", "SIGNAL is not a signal"),
        ("--signals-to-handle SIGKILL train.py", "SIGKILL cannot be handled"),
        ("--master-port 65536 train.py", "use a port from 0"),
        ("--master-port http train.py", "use a whole number"),
        ("--master-port 1 --master-addr= train.py", "use a host name or an address"),
        ("--redirects 4 train.py", "--redirects 4: "),
        ("--redirects=-1:3 train.py", "--redirects -1:3: "),
        ("--role= train.py", "use a name"),
        ("--loop trio train.py", "use one of uvloop, asyncio"),
        ("--exit-codes 1 train.py", "use one of cause, torchrun"),
        ("missing.py", "script missing.py not found"),
        ("empty", "a folder without __main__.py"),
        ("--run-path missing.py", "script missing.py not found"),
        ("-m no_such_module.part", "module no_such_module not found"),
        ("-m ./train.py", "not a module name"),
        ("--no-python no-such-program", "program no-such-program not found on PATH"),
        ("--no-python ./train.py", "not an executable file"),
        ("--no-python ./missing", "program ./missing not found"),
        ("--no-python -m json.tool", "exclude each other"),
        ("--log-dir a-file train.py", "--log-dir a-file: cannot write there (Not a directory)"),
        ("--log-dir a-file/logs train.py", "cannot write there (Not a directory)"),
        ("--log-dir /proc/logs train.py", "--log-dir /proc/logs: cannot write there"),
    ],
)
def test_bad_input_is_refused_in_one_line(folder: Path, command: str, said: str) -> None:
    assert_refused(folder, said, *command.split())


@pytest.mark.parametrize(
    "variable, value, said",
    [
        ("PET_STANDALONE", "yes", "PET_STANDALONE=yes: use 1 for yes"),
        ("PET_NPROC_PER_NODE", "0", "PET_NPROC_PER_NODE=0: at least 1 worker"),
        ("PET_NNODES", "2:1", "PET_NNODES=2:1: the minimum 2 is above the maximum 1"),
        ("PET_RDZV_BACKEND", "c10", "PET_RDZV_BACKEND=c10: no such back end: did you mean c10d?"),
        ("PET_RDZV_CONF", "lease", "PET_RDZV_CONF=lease: lease has no value"),
        ("PET_RDZV_ID", "a\nb", "use a run id without line breaks"),
        ("PET_LOG_DIR", "/proc/logs", "PET_LOG_DIR=/proc/logs: cannot write there"),
        ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "inf", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=inf: use seconds"),
        ("AELASTIC_LOOP", "trio", "AELASTIC_LOOP=trio: use one of"),
        ("PYTHON_EXEC", "no-such-python", "PYTHON_EXEC=no-such-python not found on PATH"),
    ],
)
def test_a_bad_variable_is_refused_in_one_line(folder: Path, variable: str, value: str, said: str) -> None:
    assert_refused(folder, said, "train.py", **{variable: value})


def has_device(kind: str) -> bool:
    code = f"import torch; print(int(torch.{kind}.is_available()))"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout.strip() == b"1"


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
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run([sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.startswith("usage: aelastic") and "\naelastic 0." in run.stdout


def test_an_unread_or_closed_stream_does_not_change_the_exit_code(folder: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    for redirection, command, code in (("2>&-", "missing.py", 2), (">&-", "--version", 0), ("| true", "--help", 0)):
        shell = f"set -o pipefail; {sys.executable} -m aelastic {command} {redirection}"
        run = subprocess.run(["bash", "-c", shell], cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (code, ""), redirection
