"""The memory needed to give a replacement the state, in addition to the state itself."""

from __future__ import annotations

import pytest
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.workers.in_place_training import course, start

pytestmark = [pytest.mark.timeout(3 * LAUNCH_TIMEOUT_S), pytest.mark.all]

MIB = 1 << 20
BOUND = 32 * MIB  # see docs/how-to/in-place.md
PARAMETERS = 64 * MIB
MOMENTS = 2 * PARAMETERS  # of AdamW; a fresh optimizer has none

LARGE = f"""
import torch, torch.distributed as dist

from aelastic import in_place

torch.set_num_threads(1)
model = torch.nn.ParameterList(torch.ones({PARAMETERS} // 4 // 4) for _ in range(4))
optimizer = torch.optim.AdamW(model.parameters())


def memory(name):
    (line,) = (line for line in open("/proc/self/status") if line.startswith(name))
    return int(line.split()[1]) * 1024


@in_place
def train(round):
    restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # resets VmHWM: see proc(5)
    before = memory("VmRSS")
    start = round.share(model, optimizer)
    say("grown", restarts, dist.get_rank(), memory("VmHWM") - before)
    say("shared", restarts, dist.get_rank(), os.getpid(), start)
    for step in round.steps(start, 4):
        if restarts == 0 and step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        for parameter in model:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    if dist.get_rank() == 0:
        say("end", *(each.double().sum().item() for each in model))
    dist.destroy_process_group()


train()
"""


def test_a_large_state_takes_little_more_memory_than_itself(launch: Launcher) -> None:
    """The receiver's optimizer gets its moments; apart from that, both ends need memory for a few pieces."""
    job = start(launch, LARGE, ranks=2)
    found = course(job)
    assert (found.restarts, found.kept(0, 1), found.step(1)) == (1, {0}, 2), job.story
    words = [line.split()[1:] for line in job.lines if line.startswith("grown 1 ")]
    grown = {int(rank): int(size) for _, rank, size in words}
    assert grown[0] <= BOUND, f"the sender took {grown[0] // MIB} MiB"
    assert 0.9 * MOMENTS <= grown[1] <= MOMENTS + BOUND, f"the receiver took {grown[1] // MIB} MiB"
