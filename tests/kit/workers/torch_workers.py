"""Torch in real workers, under two launchers: whatever torchrun's workers tell, ours are to tell as well."""

from __future__ import annotations

import os
import sys
import tempfile
import textwrap

from kit.launching import LAUNCH_TIMEOUT_S, PREAMBLE, Job, Launcher

TORCHRUN = "torch.distributed.run"
AELASTIC = "aelastic"

# `tell` is for the comparison: both launchers' workers have to tell the same.
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


# Now and then, under either launcher, torch aborts while the interpreter takes its process groups apart ("terminate
# called without an active exception").  So workers leave without that.
ENDING = """
if __name__ == "__main__":
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
"""


def start(launch: Launcher, launcher: str, script: str, *options: str, python: str = "", **env: str) -> Job:
    """Starts two workers, in a folder that is named by the launcher's module; warm ones, if `python` names no other."""
    if not python:
        python = sys.executable if launcher == AELASTIC else launch.warm.python
        env = {**launch.warm.env, **env}
    path = launch.write(f"{launcher}/worker.py", textwrap.dedent(script) + ENDING, preamble=TORCH_PREAMBLE)
    job = Job(launch.folder / launcher, [python, "-m", launcher, "--nproc-per-node=2", *options, str(path)], env)
    launch.jobs.append(job)
    return job


def told_under(launch: Launcher, launcher: str, script: str, *options: str, **settings: str) -> list[str]:
    """What two workers told, of a job that has succeeded."""
    # A short name, unlike that of the test's folder: multiprocessing binds sockets there, too.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as tmp:
        job = start(launch, launcher, script, *options, TMPDIR=tmp, **settings)
        code = job.wait(LAUNCH_TIMEOUT_S)
        left = [name for name in os.listdir(tmp) if name.startswith("aelastic")]
    assert code == 0, job.story
    if launcher == AELASTIC:
        assert not job.left(), job.left_described()
        assert not left  # but for the folders of torch
    return sorted(line.removeprefix("told ") for line in job.lines if line.startswith("told "))


def ours(launch: Launcher, script: str, *options: str, **settings: str) -> list[str]:
    """Runs two workers and gives what they told.

    For those that meet again after a restart, this is all there is: torchrun keeps one store for all attempts, and what
    the last one left there may make the next one wait for ever.
    """
    return told_under(launch, AELASTIC, script, *options, **settings)


def both(launch: Launcher, script: str, *options: str, **settings: str) -> list[str]:
    """Runs the same under both launchers; what the workers told, if that was the same."""
    theirs, told = (told_under(launch, each, script, *options, **settings) for each in (TORCHRUN, AELASTIC))
    assert told == theirs
    return told
