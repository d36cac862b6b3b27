"""Torch in real workers, under two launchers: our workers must report everything that torchrun's do."""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap

from kit.launching import LAUNCH_TIMEOUT_S, PREAMBLE, Job, Launcher

TORCHRUN = "torch.distributed.run"
AELASTIC = "aelastic"

# `tell` is for the comparison: both launchers' workers must report the same.
TORCH_PREAMBLE = PREAMBLE + textwrap.dedent(
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    world_size = int(os.environ.get("WORLD_SIZE", "-1"))
    SOON = timedelta(seconds=60)


    def tell(*words):
        say("told", restart, rank, *words)


    def total(group=None):
        # What an all-reduce makes of the ranks, each plus one.
        tensor = torch.tensor([rank + 1.0])
        dist.all_reduce(tensor, group=group)
        return tensor.item()


    """
)


# Under either launcher torch occasionally aborts while the interpreter destroys its process groups ("terminate called
# without an active exception").  So workers exit without that.
ENDING = """
if __name__ == "__main__":
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
"""


def start(launch: Launcher, launcher: str, script: str, *options: str, python: str = "", **env: str) -> Job:
    """Starts two workers, in a folder named after the launcher's module; they are warm unless `python` is given."""
    if not python:
        python = sys.executable if launcher == AELASTIC else launch.warm.python
        env = {**launch.warm.env, **env}
    path = launch.write(f"{launcher}/worker.py", textwrap.dedent(script) + ENDING, preamble=TORCH_PREAMBLE)
    job = Job(launch.folder / launcher, [python, "-m", launcher, "--nproc-per-node=2", *options, str(path)], env)
    launch.jobs.append(job)
    return job


def reports_under(launch: Launcher, launcher: str, script: str, *options: str, **settings: str) -> list[str]:
    """Runs two workers and returns what they reported; the job must succeed."""
    # A short name, unlike that of the test's folder, because multiprocessing binds sockets there.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        job = start(launch, launcher, script, *options, TMPDIR=tmp, **settings)
        code = job.wait(LAUNCH_TIMEOUT_S)
        left = [name for name in os.listdir(tmp) if name.startswith("aelastic")]
    assert code == 0, job.story
    if launcher == AELASTIC:
        assert not job.left(), job.left_described()
        assert not left  # except torch's folders
    return sorted(line.removeprefix("told ") for line in job.lines if line.startswith("told "))


def ours(launch: Launcher, script: str, *options: str, **settings: str) -> list[str]:
    """Runs two workers under aelastic and returns what they reported.

    Use this for workers that meet again after a restart: torchrun keeps one store for all attempts, where data of the last
    attempt may make the next one wait forever.
    """
    return reports_under(launch, AELASTIC, script, *options, **settings)


def both(launch: Launcher, script: str, *options: str, **settings: str) -> list[str]:
    """Runs the same script under both launchers, and returns what the workers reported, which must agree."""
    theirs, reported = (reports_under(launch, each, script, *options, **settings) for each in (TORCHRUN, AELASTIC))
    assert reported == theirs
    return reported
