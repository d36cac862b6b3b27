"""A worker cannot tell what started it: torchrun and aelastic get the same command line and are compared."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.effort import EFFORT
from kit.launching import LAUNCH_TIMEOUT_S
from kit.warm.interpreters import Warm
from kit.workers.environments import AELASTIC, DUMP, OF_AN_ENDPOINT, SHAPES, assert_same_env, both
from kit.workers.torch_versions import SINCE, TORCH, picks_a_free_port

STRANGE = ["", "$", "$$", "${rank}", "$HOME", "${local_rank}${local_rank}", "a\nb", "ünïcode", "--", "-m", "'\"\\"]

CASES: dict[str, tuple[str, dict[str, str]]] = {
    "no flags": ("dump.py", {"RANK": "7", "WORLD_SIZE": "9", "MASTER_ADDR": "elsewhere", "LOCAL_RANK": "3"}),
    "standalone": ("--standalone dump.py STRANGE", {"OMP_NUM_THREADS": "5"}),
    "no store shared, but a port": ("--master-port PORT dump.py", {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    "many": ("--nproc_per_node=2 --role x --max-restarts 2 --signals-to-handle SIGTERM,SIGUSR1 dump.py", {}),
    "no role": ("--role EMPTY dump.py", {}),
    "module": ("-m package.dump --flag", {}),
    "timers": ("dump.py", {"TORCHELASTIC_ENABLE_FILE_TIMER": "1"}),
    "timers in a place of their own": (
        "--master-port PORT dump.py",
        {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": "./timers"},
    ),
    "no timers, but a place for them": (
        "dump.py",
        {"TORCHELASTIC_ENABLE_FILE_TIMER": "yes", "TORCHELASTIC_TIMER_FILE": "/nowhere/timers"},
    ),
    "no python": ("--no-python ./dump.sh ${local_rank} --x=1", {}),
    "run path": ("--run-path dump.py 1", {}),
    "variables": (
        "dump.py",
        {
            "PET_NPROC_PER_NODE": "2", "PET_MAX_RESTARTS": "4", "PET_ROLE": "y", "PET_STANDALONE": "1",
            "OMP_NUM_THREADS": "3", "PYTHON_EXEC": "./python-of-theirs",
        },
    ),
}  # fmt: skip


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


QUICK = {"no flags", "standalone", "variables"}
# A single node without any option for where its workers meet.
OF_A_FREE_PORT = {
    case
    for case, (command, env) in CASES.items()
    if not {"--standalone", "--master-port", "--nnodes=1"} & set(command.split()) and "PET_STANDALONE" not in env
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.all) for case in CASES])
def test_workers_find_what_torchrun_gives_them(folder: Path, warm: Warm, case: str, torch_run: Any) -> None:
    command, env = CASES[case]
    if case in OF_A_FREE_PORT and not picks_a_free_port(torch_run.get_args_parser()):
        pytest.skip("this torchrun serves port 29500 then")
    if "--signals-to-handle" in command and SINCE["signals_to_handle"] > TORCH:
        pytest.skip("this torch has no such option")
    texts = {"STRANGE": STRANGE, "EMPTY": [""]}
    options = [each for word in command.split() for each in texts.get(word, [word])]
    theirs, ours = both(folder, options, env, warm.python)
    for rank in theirs:
        their, our = theirs[rank], ours[rank]
        assert_same_env(their.pop("env"), our.pop("env"), env)
        if "--run-path" in options:  # a multiprocessing child, which has descriptors of its own and lists them
            for each in (their, our):
                for key in ("orig_argv", "cmdline"):
                    each[key] = [re.sub(r"(tracker_fd|pipe_handle)=\d+", r"\1=N", word) for word in each[key]]
                del each["fds"], each["leads its group"]
            # Ours leads a session like any worker, so that its leftovers can be found.
            assert our.pop("leads its session") and not their.pop("leads its session")
        assert our == their


# Options for where workers meet and how they start; any of the others can be combined.
MEETING = [
    *("", "--standalone", "--master-port PORT", "--master-addr localhost --master-port PORT", "--local-addr 127.0.0.5"),
    *("--standalone --local-addr 127.0.0.5", "--rdzv-endpoint localhost:PORT", "--standalone --master-port PORT"),
    "--rdzv-backend static --rdzv-endpoint 127.0.0.1:PORT --rdzv-id q --rdzv-conf timeout=30,rank=0",
    "--nnodes 1 --rdzv-backend c10d --rdzv-id job-17 --rdzv-endpoint localhost:0",
    "--nnodes 1:1 --rdzv-backend c10d --rdzv-id j --rdzv-endpoint 127.0.0.1:PORT --rdzv-conf join_timeout=60,is_host=1",
    "--nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint localhost:PORT --rdzv-conf last_call_timeout=1",
]
STARTED = [
    "dump.py",
    "dump.py --x 1",
    "-m package.dump --flag",
    "--no-python ./dump.sh ${local_rank}",
    "--run-path dump.py 1",
]
FLAGS = {
    "--nproc-per-node": ("1", "2", "3", "cpu", "auto"),
    "--role": ("trainer", "ünï", "a b"),
    "--max-restarts": ("0", "1", "7"),
    "--monitor-interval": ("0.1", "2"),
    "--start-method": ("spawn", "fork", "forkserver"),
    "--signals-to-handle": ("SIGTERM", "SIGTERM,SIGUSR1"),
    "--log-dir": ("logs",),
    "--tee": ("3", "0:1"),
    "--redirects": ("1", "0:2"),
    "--local-ranks-filter": ("0",),
    "--virtual-local-rank": ("",),
    "--node-rank": ("0",),
    "--event-log-handler": ("null",),
    "--shutdown-timeout": ("5",),
}
VARIABLES = {
    "OMP_NUM_THREADS": ("", "3"),
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": ("0", "1"),
    "TORCHELASTIC_ENABLE_FILE_TIMER": ("0", "1"),
    "TORCHELASTIC_USE_AGENT_STORE": ("False", "x"),
    "TORCHELASTIC_RUN_ID": ("older",),
    "TORCHELASTIC_ERROR_FILE": ("/nowhere/error.json",),
    "TORCHELASTIC_MAX_RESTARTS": ("99",),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("0",),
    "NCCL_ASYNC_ERROR_HANDLING": ("0",),
    "CUDA_VISIBLE_DEVICES": ("", "1,0"),
    "RANK": ("7",),
    "LOCAL_WORLD_SIZE": ("9",),
    "GROUP_RANK": ("5",),
    "ROLE_NAME": ("older",),
    "MASTER_ADDR": ("elsewhere",),
    "MASTER_PORT": ("1",),
    "PYTHONUNBUFFERED": ("1",),
    "LOGLEVEL": ("INFO",),
    "PYTHON_EXEC": ("./python-of-theirs",),
    "SLURM_NODEID": ("3",),
}


def drawn(seed: int) -> tuple[list[str], dict[str, str]]:
    """A random command line and variables; an option is on the command line, in either spelling, or in its variable."""
    draw = random.Random(seed)
    options, env = MEETING[seed % len(MEETING)].split(), {}
    for flag in draw.sample(sorted(FLAGS), draw.randint(0, 6)):
        if SINCE.get(flag[2:].replace("-", "_"), TORCH) > TORCH:
            continue
        value, way = draw.choice(FLAGS[flag]), draw.choice(("-", "_", "variable"))
        if way == "variable":
            env["PET_" + flag[2:].replace("-", "_").upper()] = value or "1"
        else:
            options += ["--" + flag[2:].replace("-", way), *([value] if value else [])]
    env |= {name: draw.choice(VARIABLES[name]) for name in draw.sample(sorted(VARIABLES), draw.randint(0, 5))}
    return [*options, *draw.choice(STARTED).split()], env


# One runs a program and the other a module; with `--run-path`, each worker under torchrun would import torch.
QUICK_SEEDS = (1, 6)


@pytest.mark.parametrize("seed", {"quick": QUICK_SEEDS, "all": range(16), "soak": range(100)}[EFFORT])
def test_workers_find_the_same_whatever_flags_and_variables_are_together(
    folder: Path, warm: Warm, seed: int, torch_run: Any
) -> None:
    options, env = drawn(seed)
    if not picks_a_free_port(torch_run.get_args_parser()):
        pytest.skip("this torchrun serves port 29500 where nothing says where workers meet")
    is_at_endpoint = "c10d" in options and "localhost:0" not in options
    shapes = SHAPES | OF_AN_ENDPOINT if is_at_endpoint else SHAPES
    theirs, ours = both(folder, options, env, warm.python)
    for rank in theirs:
        assert_same_env(theirs[rank]["env"], ours[rank]["env"], env, shapes)


def test_what_the_agent_ignores_and_its_umask_and_priority_are_passed_on_and_no_worker_gets_port_0(
    folder: Path,
) -> None:
    def prepare() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.umask(0o027)
        os.nice(3)

    # torchrun passes the 0 on, and no worker can connect to it.
    run = subprocess.run(
        [*AELASTIC, "--master-port", "0", "dump.py"],
        cwd=folder,
        env={**os.environ, "DUMP_TO": ".", "TMPDIR": str(folder)},
        timeout=LAUNCH_TIMEOUT_S,
        check=False,
        preexec_fn=prepare,
    )
    assert run.returncode == 0
    described = json.loads((folder / "0.json").read_text())
    assert int(described["env"]["MASTER_PORT"]) > 1023 and described["env"]["TORCHELASTIC_RUN_ID"] == "none"
    assert (int(described["umask"], 8), described["nice"], int(described["blocked"], 16)) == (0o027, os.nice(0) + 3, 0)
    # torchrun handles SIGHUP even if it is ignored, and its workers don't ignore it: nohup does not work there.
    assert all(int(described["ignored"], 16) & 1 << (signum - 1) for signum in (signal.SIGHUP, signal.SIGUSR2))
