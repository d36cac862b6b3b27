"""A worker can't tell who started it: torchrun and aelastic, given the same command line, are compared."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.launching import LAUNCH_TIMEOUT_S

# A worker that writes down what it finds, into a file named by its rank.
DUMP = """\
import json, os, signal, sys

def status(name):
    for line in open("/proc/self/status"):
        if line.startswith(name + ":"):
            return line.split(":", 1)[1].strip()

fds = {}
for fd in os.listdir("/proc/self/fd"):
    try:
        fds[fd] = os.readlink("/proc/self/fd/" + fd)
    except OSError:
        pass
with open(os.path.join(os.environ["DUMP_TO"], os.environ["RANK"] + ".json"), "w") as file:
    json.dump({
        "env": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv,
        "path0": sys.path[0],
        "main": __name__,
        "cmdline": open("/proc/self/cmdline").read().split("\\0")[:-1],
        "cwd": os.getcwd(),
        "stdin": fds["0"],
        "stdout": fds["1"].split(":")[0],
        "fds": sorted(int(fd) for fd in fds),
        "leads its session": os.getsid(0) == os.getpid(),
        "leads its group": os.getpgid(0) == os.getpid(),
        "ignored": status("SigIgn"),
        "blocked": status("SigBlk"),
        "umask": status("Umask"),
        "nice": os.nice(0),
        "unbuffered": sys.stdout.write_through,
    }, file)
"""

TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
AELASTIC = (sys.executable, "-m", "aelastic")

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
# What differs from run to run, and what it looks like.
SHAPES = {
    "MASTER_PORT": r"[1-9]\d{3,4}",
    "TORCHELASTIC_RUN_ID": UUID,
    "TORCHELASTIC_ERROR_FILE": r"/.+/attempt_0/\d+/error\.json",
    "TORCHELASTIC_TIMER_FILE": r"/.+/(watchdog_timer_.+|aelastic_[0-9a-f]{8}/timers)",
}
# The torch agent imports torch in its own process, and that leaves these in its environment for its workers.
OF_IMPORTING_TORCH = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}

STRANGE = ["", "$", "$$", "${rank}", "$HOME", "${local_rank}${local_rank}", "a\nb", "ünïcode", "--", "-m", "'\"\\"]

CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "no flags": (["dump.py"], {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "elsewhere", "LOCAL_RANK": "3"}),
    "standalone": (["--standalone", "dump.py", *STRANGE], {"OMP_NUM_THREADS": "5"}),
    "port": (["--master-port", "PORT", "dump.py"], {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}),
    "address and port": (["--master-addr", "localhost", "--master-port", "PORT", "dump.py"], {}),
    "local address": (["--local-addr", "127.0.0.5", "dump.py"], {}),
    "no store shared": (["--nproc-per-node=2", "dump.py"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    "no store shared, but a port": (["--master-port", "PORT", "dump.py"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    "c10d on its own": (
        ["--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job-17", "dump.py"],
        {"SLURM_NODEID": "3"},
    ),
    "many": (
        [
            "--nproc_per_node=2",
            "--role",
            "x",
            "--max-restarts",
            "2",
            "--signals-to-handle",
            "SIGTERM,SIGUSR1",
            "dump.py",
        ],
        {},
    ),
    "module": (["-m", "package.dump", "--flag"], {}),
    "timers": (["dump.py"], {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}),
    "timers in a place of their own": (
        ["--master-port", "PORT", "dump.py"],
        {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "./timers"},
    ),
    "no timers, but a place for them": (
        ["dump.py"],
        {"TORCHELASTIC_ENABLE_FILE_TIMER": "yes", "TORCHELASTIC_TIMER_FILE": "/nowhere/timers"},
    ),
    "no python": (["--no-python", "./dump.sh", "${local_rank}", "--x=1"], {}),
    "run path": (["--run-path", "dump.py", "1"], {}),
    "variables": (
        ["dump.py"],
        {
            "PET_NPROC_PER_NODE": "2",
            "PET_MAX_RESTARTS": "4",
            "PET_ROLE": "y",
            "PET_STANDALONE": "1",
            "OMP_NUM_THREADS": "3",
            "PYTHON_EXEC": "./python-of-theirs",
        },
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "dump.py").write_text(DUMP)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "dump.py").write_text(DUMP)
    for name, text in {
        "dump.sh": f'#!/bin/sh\nexec {sys.executable} dump.py "$@"\n',
        "python-of-theirs": f'#!/bin/sh\nexport THEIRS="$*"\nexec {sys.executable} "$@"\n',
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def both(folder: Path, options: list[str], env: dict[str, str], **popen: Any) -> list[dict[str, dict[str, Any]]]:
    """Runs torchrun and aelastic side by side; what their workers have written, by rank."""
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PET_", "AELASTIC_", "TORCH", "OMP_", "PYTEST_", "KMP_"))
    }
    is_static = "PORT" in options  # both serve it: one after the other
    port = free_port()
    command = [str(port) if option == "PORT" else option for option in options]
    runs: list[subprocess.Popen[bytes]] = []
    # A file, which workers of both inherit: a pipe ours would not.
    with (folder / "said").open("ab") as said, contextlib.ExitStack() as ending:
        for name, launcher in (("torchrun", TORCHRUN), ("aelastic", AELASTIC)):
            (folder / name).mkdir()
            run = subprocess.Popen(
                [*launcher, *command],
                cwd=folder,
                env={**base, **env, "DUMP_TO": name, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                **popen,
            )
            ending.callback(run.wait)
            ending.callback(run.kill)
            runs.append(run)
            if is_static:
                wait_over(run, folder / "said")
        for run in runs:
            wait_over(run, folder / "said")
    found = [
        {path.stem: json.loads(path.read_text()) for path in (folder / name).iterdir()}
        for name in ("torchrun", "aelastic")
    ]
    assert found[0] and sorted(found[0]) == sorted(found[1])
    return found


def wait_over(run: subprocess.Popen[bytes], said: Path) -> None:
    assert run.wait(LAUNCH_TIMEOUT_S) == 0, said.read_text()


def free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def assert_same_env(theirs: dict[str, str], ours: dict[str, str], env: dict[str, str]) -> None:
    theirs, ours = dict(theirs), dict(ours)
    for each, name in ((theirs, "torchrun"), (ours, "aelastic")):
        assert each.pop("DUMP_TO") == name
        for key in OF_IMPORTING_TORCH - env.keys():
            each.pop(key, None)
    # torchrun sets none: `worker_main` of its control plane serves nothing there.
    assert "TORCH_WORKER_SERVER_SOCKET" not in theirs
    assert re.fullmatch(r"/.+/aelastic_[0-9a-f]{8}/control_0_\d+", ours.pop("TORCH_WORKER_SERVER_SOCKET"))
    for key, shape in SHAPES.items():
        if theirs.get(key) != ours.get(key):
            assert re.fullmatch(shape, theirs.pop(key)), key
            assert re.fullmatch(shape, ours.pop(key)), key
    assert ours == theirs


@pytest.mark.parametrize("case", CASES)
def test_workers_find_what_torchrun_gives_them(folder: Path, case: str) -> None:
    options, env = CASES[case]
    theirs, ours = both(folder, options, env)
    for rank in theirs:
        their, our = theirs[rank], ours[rank]
        assert_same_env(their.pop("env"), our.pop("env"), env)
        if "--run-path" in options:  # a child of multiprocessing, which has descriptors of its own and names them
            for each in (their, our):
                for key in ("orig_argv", "cmdline"):
                    each[key] = [re.sub(r"(tracker_fd|pipe_handle)=\d+", r"\1=N", word) for word in each[key]]
                del each["fds"], each["leads its group"]
            # Ours leads a session as any worker does, so that what it leaves behind can be found.
            assert our.pop("leads its session") and not their.pop("leads its session")
        assert our == their


def test_what_the_agent_ignores_and_its_umask_and_priority_are_passed_on(folder: Path) -> None:
    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.umask(0o027)
        os.nice(3)

    theirs, ours = both(folder, ["dump.py"], {}, preexec_fn=prepare)
    for key in ("umask", "nice", "blocked"):
        assert ours["0"][key] == theirs["0"][key], key
    # torchrun takes SIGHUP over even when it is ignored, and its workers do not ignore it: nohup does not work there.
    their_ignored, our_ignored = (int(each["0"]["ignored"], 16) for each in (theirs, ours))
    assert our_ignored == their_ignored | 1 << (signal.SIGHUP - 1)
    assert our_ignored & 1 << (signal.SIGUSR2 - 1)


def test_a_worker_is_never_told_of_port_0(folder: Path) -> None:
    # torchrun hands the 0 on, and no worker can connect to that.
    run = subprocess.run(
        [*AELASTIC, "--master-port", "0", "dump.py"],
        cwd=folder,
        env={**os.environ, "DUMP_TO": ".", "TMPDIR": str(folder)},
        timeout=LAUNCH_TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0
    env = json.loads((folder / "0.json").read_text())["env"]
    assert int(env["MASTER_PORT"]) > 1023 and env["TORCHELASTIC_RUN_ID"] == "none"
