"""A worker that joins a gloo process group, says when that is done, and leaves; told to `stay`, it waits before."""

import os
import sys
import time

import torch.distributed as dist

dist.init_process_group("gloo")
done = time.monotonic()
fifo = os.open(sys.argv[1], os.O_WRONLY)
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(fifo, f"joined {dist.get_rank()} {restart} {os.getpid()} {done!r}\n".encode())
os.close(fifo)
if sys.argv[2:] == ["stay"]:
    time.sleep(120)  # nothing is left for longer, whatever becomes of the harness
dist.destroy_process_group()
