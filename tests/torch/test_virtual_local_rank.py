"""With `--virtual-local-rank` each worker sees one device, its own: torchrun and aelastic are compared."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.warm.interpreters import Warm
from kit.workers import entrypoints
from kit.workers.environments import AELASTIC, DUMP, TORCHRUN, assert_same_env, both
from kit.workers.torch_versions import SINCE, TORCH

from aelastic import InputError, Supervisor, WorkerSpec

VARIABLE = "CUDA_VISIBLE_DEVICES"

pytestmark = pytest.mark.skipif(SINCE["virtual_local_rank"] > TORCH, reason="this torch has no such option")

# What the variable says, and what it says to each worker.
DEVICES: dict[str, tuple[str | None, list[str]]] = {
    "unset": (None, ["0", "1"]),
    "numbers": ("5,7", ["5", "7"]),
    "spaces": (" 5 , 7 ", ["5", "7"]),
    "more than workers": ("3,2,1,0", ["3", "2"]),
    "UUIDs": ("GPU-8932f937-d72c,GPU-9f12a8c1-0c8e", ["GPU-8932f937-d72c", "GPU-9f12a8c1-0c8e"]),
    "slices of a device": ("MIG-1c8e,MIG-9f12", ["MIG-1c8e", "MIG-9f12"]),
    "the same twice": ("0,0", ["0", "0"]),
    "none for the second": ("0,", ["0", ""]),
    "none for one worker": ("", [""]),
    "none at all for one worker": ("-1", ["-1"]),
}
QUICK = {"unset", "numbers", "UUIDs"}

# What AMD's variable and the other one say, and what they say to each worker; torch heeds the first since 2.15.
HIP = "HIP_VISIBLE_DEVICES"
OF_HIP: dict[str, tuple[dict[str, str], list[tuple[str | None, str]]]] = {
    "alone": ({HIP: "5, 7"}, [("5", "5"), ("7", "7")]),
    "before the other": ({HIP: "1,0", VARIABLE: "5,7"}, [("1", "1"), ("0", "0")]),
    "empty": ({HIP: "", VARIABLE: "5,7"}, [("", "5"), ("", "7")]),
}


@pytest.mark.parametrize(
    "case, way",
    [
        *(pytest.param(case, "script", marks=() if case in QUICK else pytest.mark.all) for case in DEVICES),
        pytest.param("UUIDs", "run path", marks=pytest.mark.all),
    ],
)
def test_workers_find_what_torchrun_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Warm, case: str, way: str
) -> None:
    visible, own = DEVICES[case]
    monkeypatch.delenv(VARIABLE, raising=False)
    env = {} if visible is None else {VARIABLE: visible}
    (tmp_path / "dump.py").write_text(DUMP)
    options = ["--virtual-local-rank", f"--nproc-per-node={len(own)}", *(["--run-path"] if way == "run path" else [])]
    theirs, ours = both(tmp_path, [*options, "dump.py", "${local_rank}"], env, warm.python)
    assert [ours[str(rank)]["env"][VARIABLE] for rank in range(len(own))] == own
    for rank in theirs:
        assert ours[rank]["env"]["LOCAL_RANK"] == "0"
        assert ours[rank]["argv"] == theirs[rank]["argv"] == ["dump.py", rank]
        assert_same_env(theirs[rank]["env"], ours[rank]["env"], env)


@pytest.mark.parametrize("case", [pytest.param("alone", marks=pytest.mark.all), "before the other", "empty"])
def test_the_variable_of_amd_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Warm, case: str
) -> None:
    env, own = OF_HIP[case]
    for variable in (VARIABLE, HIP):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "dump.py").write_text(DUMP)
    theirs, ours = both(tmp_path, ["--virtual-local-rank", "--nproc-per-node=2", "dump.py"], env, warm.python)
    found = [ours[str(rank)]["env"] for rank in range(len(own))]
    assert [(each.get(HIP), each[VARIABLE]) for each in found] == own
    if TORCH >= (2, 15):
        for rank in theirs:
            assert_same_env(theirs[rank]["env"], ours[rank]["env"], env)


def test_logs_and_prefixes_go_by_the_true_local_rank_as_with_torchrun(tmp_path: Path, warm: Warm) -> None:
    (tmp_path / "worker.py").write_text("import os; print('told', os.environ['LOCAL_RANK'])")
    said = {}
    for name, launcher in (("torchrun", (warm.python, *TORCHRUN[1:])), ("aelastic", AELASTIC)):
        ran = subprocess.run(
            [*launcher, "--virtual-local-rank", "--nproc-per-node=2", "--tee=3", f"--log-dir={name}", "worker.py"],
            cwd=tmp_path,
            env={**os.environ, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${local_rank} ${rank}>"},
            capture_output=True,
            text=True,
            timeout=LAUNCH_TIMEOUT_S,
            check=True,
        )
        said[name] = sorted(line for line in ran.stdout.splitlines() if "told" in line)
        logs = tmp_path.glob(f"{name}/*/attempt_0/*/stdout.log")
        assert {log.parent.name: log.read_text() for log in logs} == {"0": "told 0\n", "1": "told 0\n"}
    assert said["aelastic"] == said["torchrun"] == ["<0 0>told 0", "<1 1>told 0"]


@pytest.mark.parametrize(
    "visible, without",
    [
        ("3", 1),
        pytest.param("", 1, marks=pytest.mark.all),
        pytest.param("-1", 1, marks=pytest.mark.all),
        ("GPU-1,GPU-2", 2),
    ],
)
def test_fewer_devices_than_workers_are_refused_where_torchrun_fails(
    launch: Launcher, tmp_path: Path, visible: str, without: int
) -> None:
    (tmp_path / "worker.py").write_text("print('started')")
    options = ["--virtual-local-rank", "--nproc-per-node=3"]
    ran = subprocess.run(
        [launch.warm.python, *TORCHRUN[1:], *options, "worker.py"],
        cwd=tmp_path,
        env={**os.environ, VARIABLE: visible},
        capture_output=True,
        text=True,
        timeout=LAUNCH_TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 1
    assert f"local_rank {without} exceeds available GPUs" in ran.stderr
    job = launch("say('started')", *options, env={VARIABLE: visible})
    job.assert_ends(2)
    assert not job.stdout
    [line] = job.stderr.splitlines()
    assert line.startswith(f"aelastic: error: {VARIABLE}={visible!r} has no device for local rank {without}")


def test_the_library_looks_at_the_environment_that_workers_get() -> None:
    def supervisor(visible: str) -> Supervisor:
        env = {**os.environ, VARIABLE: visible}
        return Supervisor(
            WorkerSpec(
                entrypoint=entrypoints.describe_self,
                local_world_size=2,
                virtual_local_rank=True,
                env=env,
                max_restarts=0,
            )
        )

    result = asyncio.run(supervisor("2,3").run())
    assert [value["local_rank"] for value in result.return_values.values()] == ["0", "0"]
    with pytest.raises(InputError, match=f"{VARIABLE}='2' has no device for local rank 1"):
        asyncio.run(supervisor("2").run())
