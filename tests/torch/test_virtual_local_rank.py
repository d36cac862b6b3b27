"""With `--virtual-local-rank` each worker sees a single device, its own: torchrun and aelastic are compared."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from kit.launching import Launcher, ran
from kit.warm.interpreters import Warm
from kit.workers import entrypoints
from kit.workers.environments import AELASTIC, DUMP, TORCHRUN, assert_same_env, both
from kit.workers.torch_versions import SINCE, TORCH

from aelastic import InputError, RunResult, Supervisor, WorkerSpec

VARIABLE = "CUDA_VISIBLE_DEVICES"

pytestmark = pytest.mark.skipif(SINCE["virtual_local_rank"] > TORCH, reason="this torch has no such option")


# core/test_devices.py covers other values of the variable.
def test_workers_find_what_torchrun_gives_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warm: Warm) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    env = {VARIABLE: " GPU-8932f937-d72c , 7,9"}
    (tmp_path / "dump.py").write_text(DUMP)
    options = ["--virtual-local-rank", "--nproc-per-node=2", "dump.py", "${local_rank}"]
    theirs, ours = both(tmp_path, options, env, warm.python)
    assert [ours[rank]["env"][VARIABLE] for rank in "01"] == ["GPU-8932f937-d72c", "7"]
    for rank in theirs:
        assert ours[rank]["env"]["LOCAL_RANK"] == "0"
        assert ours[rank]["argv"] == theirs[rank]["argv"] == ["dump.py", rank]
        assert_same_env(theirs[rank]["env"], ours[rank]["env"], env)


def test_logs_and_prefixes_go_by_the_true_local_rank_as_with_torchrun(tmp_path: Path, warm: Warm) -> None:
    # In one write: otherwise, lines of torchrun's two workers get mixed up.
    code = "import os; os.write(1, b'told ' + os.environb[b'LOCAL_RANK'] + b'\\n')"
    (tmp_path / "worker.py").write_text(code)
    printed, env = {}, {**os.environ, "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "<${local_rank} ${rank}>"}
    for name, launcher in (("torchrun", (warm.python, *TORCHRUN[1:])), ("aelastic", AELASTIC)):
        options = ("--virtual-local-rank", "--nproc-per-node=2", "--tee=3", f"--log-dir={name}", "worker.py")
        done = ran(*launcher, *options, cwd=tmp_path, env=env, check=True)
        printed[name] = sorted(line for line in done.stdout.splitlines() if "told" in line)
        logs = tmp_path.glob(f"{name}/*/attempt_0/*/stdout.log")
        assert {log.parent.name: log.read_text() for log in logs} == {"0": "told 0\n", "1": "told 0\n"}
    assert printed["aelastic"] == printed["torchrun"] == ["<0 0>told 0", "<1 1>told 0"]


def test_fewer_devices_than_workers_are_refused_where_torchrun_fails(launch: Launcher, tmp_path: Path) -> None:
    (tmp_path / "worker.py").write_text("print('started')")
    visible, without = "GPU-1,GPU-2", 2
    options = ["--virtual-local-rank", "--nproc-per-node=3"]
    command, env = (launch.warm.python, *TORCHRUN[1:], *options, "worker.py"), {**os.environ, VARIABLE: visible}
    done = ran(*command, cwd=tmp_path, env=env)
    assert done.returncode == 1
    assert f"local_rank {without} exceeds available GPUs" in done.stderr
    job = launch("say('started')", *options, env={VARIABLE: visible})
    job.assert_ends(2)
    assert not job.stdout
    [line] = job.stderr.splitlines()
    assert line.startswith(f"aelastic: error: {VARIABLE}={visible!r} has no device for local rank {without}")


def test_the_library_looks_at_the_environment_that_workers_get() -> None:
    usual: dict[str, Any] = {"entrypoint": entrypoints.describe_self, "local_world_size": 2, "virtual_local_rank": True}

    def run(visible: str) -> RunResult:
        return asyncio.run(Supervisor(WorkerSpec(**usual, env={**os.environ, VARIABLE: visible}, max_restarts=0)).run())

    assert [value["local_rank"] for value in run("2,3").return_values.values()] == ["0", "0"]
    with pytest.raises(InputError, match=f"{VARIABLE}='2' has no device for local rank 1"):
        run("2")
