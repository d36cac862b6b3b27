"""The environment of workers under torchrun and under aelastic, side by side."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kit.launching import LAUNCH_TIMEOUT_S
from kit.ports import quiet_port
from kit.workers.torch_versions import SINCE, TORCH

# A worker that writes its environment to a file named after its rank.
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


# Variables that differ from run to run, and their form.
SHAPES = {
    "MASTER_PORT": r"[1-9]\d{3,4}",
    "TORCHELASTIC_RUN_ID": UUID,
    "TORCHELASTIC_ERROR_FILE": r"(logs|/.+)/[^/]+/attempt_0/\d+/error\.json",  # ours is absolute
    "TORCHELASTIC_TIMER_FILE": r"/.+/(watchdog_timer_.+|aelastic_[0-9a-f]{8}/timers)",
}


# With c10d at an endpoint: torchrun sets the host's name, and aelastic the address that other nodes reached.
OF_AN_ENDPOINT = {"MASTER_ADDR": rf"{re.escape(socket.getfqdn())}|localhost|127\.0\.0\.1"}


# Variables that only our workers have, and their form.
OURS = {
    # torchrun does not set it: `worker_main` of its control plane serves nothing there.
    "TORCH_WORKER_SERVER_SOCKET": r"/.+/aelastic_[0-9a-f]{8}/control_0_\d+",
    "AELASTIC_ROUND": r"\d+",
    "AELASTIC_IN_PLACE": r"1:/.+/aelastic_[0-9a-f]{8}/in_place_\d+_\d+",
    "AELASTIC_NOTICE_PAGE": r"/.+/aelastic_[0-9a-f]{8}/notice_\d+_\d+",
}


# The torch agent imports torch in its own process, which leaves these in the environment of its workers.
OF_IMPORTING_TORCH = {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK", "TORCHINDUCTOR_CACHE_DIR"}


def both(
    folder: Path, options: list[str], env: dict[str, str], python: str = sys.executable, **popen: Any
) -> list[dict[str, dict[str, Any]]]:
    """Runs torchrun and aelastic side by side; returns what their workers wrote, by rank.

    Args:
        python: torchrun's interpreter.
    """
    base = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PET_", "AELASTIC_", "TORCH", "OMP_", "PYTEST_", "KMP_"))
    }
    is_static = any("PORT" in option for option in options)  # both serve it, so they run one after the other
    port = quiet_port()
    command = [option.replace("PORT", str(port)) for option in options]
    runs: list[subprocess.Popen[bytes]] = []
    # A file, because workers of both inherit it; ours would not inherit a pipe.
    with (folder / "output").open("ab") as output, contextlib.ExitStack() as ending:
        for name, launcher in (("torchrun", (python, *TORCHRUN[1:])), ("aelastic", AELASTIC)):
            (folder / name).mkdir()
            run = subprocess.Popen(
                [*launcher, *command],
                cwd=folder,
                env={**base, **env, "DUMP_TO": name, "TMPDIR": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                **popen,
            )
            ending.callback(run.wait)
            ending.callback(run.kill)
            runs.append(run)
            if is_static:
                wait_over(run, folder / "output")
        for run in runs:
            wait_over(run, folder / "output")
    found = [
        {path.stem: json.loads(path.read_text()) for path in (folder / name).iterdir()}
        for name in ("torchrun", "aelastic")
    ]
    assert found[0] and sorted(found[0]) == sorted(found[1]), (command, (folder / "output").read_text())
    return found


def wait_over(run: subprocess.Popen[bytes], output: Path) -> None:
    assert run.wait(LAUNCH_TIMEOUT_S) == 0, output.read_text()


def assert_same_env(
    theirs: dict[str, str], ours: dict[str, str], env: dict[str, str], shapes: Mapping[str, str] = SHAPES
) -> None:
    theirs, ours = dict(theirs), dict(ours)
    for each, name in ((theirs, "torchrun"), (ours, "aelastic")):
        assert each.pop("DUMP_TO") == name
        for key in OF_IMPORTING_TORCH - env.keys():
            each.pop(key, None)
    for key, shape in OURS.items():
        assert key not in theirs
        assert re.fullmatch(shape, ours.pop(key)), key
    if SINCE["signals_to_handle"] > TORCH:
        assert "TORCHELASTIC_SIGNALS_TO_HANDLE" not in theirs
        del ours["TORCHELASTIC_SIGNALS_TO_HANDLE"]
    assert os.path.isabs(ours["TORCHELASTIC_ERROR_FILE"])
    for key, shape in shapes.items():
        if theirs.get(key) != ours.get(key):
            for found in (theirs.pop(key, "nothing"), ours.pop(key, "nothing")):
                assert re.fullmatch(shape, found), f"{key}: {found}"
    different = {
        key: (theirs.get(key), ours.get(key)) for key in theirs.keys() | ours.keys() if theirs.get(key) != ours.get(key)
    }
    assert not different, different
