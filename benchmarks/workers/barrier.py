"""A worker that joins a gloo group, passes a barrier and says so: `barrier.py FIFO FAILURES [SECONDS]`.

Rank 1 fails so often, so many seconds after that.
"""

import os
import sys
import time

import torch.distributed as dist

dist.init_process_group("gloo")
dist.barrier()
done = time.monotonic()
rank, restart = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
fifo = os.open(sys.argv[1], os.O_WRONLY)


def stamp(kind: str, at: float) -> None:
    os.write(fifo, f"{kind} {rank} {restart} {os.getpid()} {at!r}\n".encode())


stamp("joined", done)
if restart < int(sys.argv[2]):
    time.sleep(float(sys.argv[3]) if sys.argv[3:] else 1.5)  # as a job would: the next failure is not at once
    if rank == 1:
        stamp("crashed", time.monotonic())
        os._exit(1)
    time.sleep(60)
dist.destroy_process_group()
