"""Under other launchers: which programs become aelastic, and what DeepSpeed's command lines mean."""

from __future__ import annotations

import base64
import json
import os
import sys
from pathlib import Path

import pytest

from aelastic.cli.arguments import parse
from aelastic.errors import InputError
from aelastic.settings import Std
from aelastic.under import __main__ as under
from aelastic.under import deepspeed
from aelastic.under.site.sitecustomize import command_in_place_of

# Arguments of Python, and the program that runs instead.
LAUNCHERS = {
    "-m torch.distributed.run --nnodes 1 t.py -m x": "-m aelastic --nnodes 1 t.py -m x",
    "-u -W ignore -m torch.distributed.run t.py": "-u -W ignore -m aelastic t.py",
    "-X dev -m torch.distributed.launch t.py": "-X dev -m aelastic.launch t.py",
    "/opt/v/bin/torchrun --standalone t.py": "-m aelastic --standalone t.py",
    "-I torchrun t.py": "-I -m aelastic t.py",
    "-u -m deepspeed.launcher.launch --world_info=x t.py": "-u -m aelastic.under.deepspeed --world_info=x t.py",
}
OTHERS = ["", "t.py torchrun", "-m torchrun", "-c torchrun", "-", "-m", "-m torch.utils.collect_env", "torch.distributed.run",
          "-W torchrun t.py", "-u", "accelerate launch t.py"]  # fmt: skip


@pytest.mark.parametrize("line", LAUNCHERS)
def test_a_python_that_is_torchs_launcher_becomes_aelastic(line: str) -> None:
    assert command_in_place_of(line.split()) == LAUNCHERS[line].split()


@pytest.mark.parametrize("line", OTHERS)
def test_any_other_python_stays_what_it_is(line: str) -> None:
    assert command_in_place_of(line.split()) is None


def test_a_program_is_looked_for_beside_this_python_first(tmp_path: Path) -> None:
    for name in (os.path.basename(sys.executable), "here"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": str(tmp_path)}
    assert under.command_of([os.path.basename(sys.executable), "a"], environ) == [sys.executable, "a"]
    assert under.command_of(["here", "a"], environ) == [str(tmp_path / "here"), "a"]
    for argv in (["t.py", "a"], ["-m", "t"], ["-c", "1"]):
        assert under.command_of(argv, environ) == [sys.executable, *argv]
    with pytest.raises(FileNotFoundError):
        under.command_of(["nowhere"], environ)


def test_our_folder_is_first_on_the_path_and_only_once() -> None:
    once = under.environment_of({"PYTHONPATH": "/theirs", "X": "1"})
    ours, theirs = once["PYTHONPATH"].split(os.pathsep)
    assert os.path.isfile(f"{ours}/sitecustomize.py") and theirs == "/theirs" and once["X"] == "1"
    assert under.environment_of(once) == once
    assert under.environment_of({})["PYTHONPATH"] == ours


# DeepSpeed.


def world(**devices: list[int]) -> str:
    return f"--world_info={base64.urlsafe_b64encode(json.dumps(devices).encode()).decode()}"


def test_a_command_of_deepspeeds_runner_is_a_job_of_as_many_nodes_and_devices(script: str) -> None:
    line = [world(a=[0, 1], b=[2, 3, 5]), "--master_addr=10.0.0.1", "--master_port=29719", "--node_rank=1",
            "--enable_each_rank_log=None", "--log_level=info", "--save_pid", "7", script, "--x", "1"]  # fmt: skip
    command, added = deepspeed.translate(deepspeed.parser().parse_args(line))
    spec = parse(command, {"PATH": os.defpath}).spec
    assert spec.rdzv is not None
    assert (spec.rdzv.max_nodes, spec.rdzv.node_rank, spec.rdzv.endpoint) == (2, 1, "10.0.0.1:29719")
    assert (spec.local_world_size, spec.max_restarts) == (3, 0)
    assert spec.args == ("-u", script, "--local_rank=${local_rank}", "--x", "1")
    assert added == {"CUDA_VISIBLE_DEVICES": "2,3,5", "CROSS_RANK": "1", "CROSS_SIZE": "2", "LOCAL_SIZE": "3"}


def test_deepspeeds_choices_of_what_runs_and_where_output_goes_are_kept(script: str, tmp_path: Path) -> None:
    options = ["--no_local_rank", f"--enable_each_rank_log={tmp_path}", "--module", world(localhost=[0])]
    command, _ = deepspeed.translate(deepspeed.parser().parse_args([*options, "json.tool", "a"]))
    spec = parse(command, {"PATH": os.defpath}).spec
    assert spec.args == ("-u", "-m", "json.tool", "a")
    assert (spec.log_dir, spec.redirects) == (tmp_path, Std.ALL)


@pytest.mark.parametrize("line", ["--world_info=None t.py", "--world_info=W10= t.py", "--node_rank=1 ONE t.py"])
def test_what_deepspeeds_runner_does_not_say_is_refused(line: str) -> None:
    argv = [world(localhost=[0]) if word == "ONE" else word for word in line.split()]
    with pytest.raises(InputError, match=r"--world_info|--node_rank"):
        deepspeed.translate(deepspeed.parser().parse_args(argv))
