"""Takes steps together with all ranks, and saves when a notice is due; a line of JSON for each thing that happens.

`STEP_S`: how long a step takes, at random up to twice.  `OUT`: the folder for lines and checkpoint.  `BY_SIGNAL`: save
when SIGUSR1 has come, as scripts do without an agent that agrees on a step.
"""

import json
import os
import random
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from aelastic import notice

out, step_s = Path(os.environ["OUT"]), float(os.environ["STEP_S"])
is_told = False


def on_signal(*_: object) -> None:
    global is_told  # noqa: PLW0603
    is_told = True


def say(what: str, step: int) -> None:
    line = json.dumps([time.time(), os.environ["AELASTIC_ROUND"], dist.get_rank(), dist.get_world_size(), what, step])
    with open(out / "lines", "a") as file:
        file.write(line + "\n")


if os.environ.get("BY_SIGNAL"):
    signal.signal(signal.SIGUSR1, on_signal)
dist.init_process_group("gloo")
checkpoint = out / "checkpoint"
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
say("start", step)
number = torch.zeros(1)
while True:
    time.sleep(step_s * 2 * random.random())  # noqa: S311  no secret
    dist.all_reduce(number)
    step += 1
    if is_told or notice.due():
        dist.barrier()  # a save is of all ranks
        if dist.get_rank() == 0:
            checkpoint.with_suffix(".part").write_text(str(step))
            checkpoint.with_suffix(".part").rename(checkpoint)
        dist.barrier()
        say("saved", step)
        is_told = False
        notice.saved()
