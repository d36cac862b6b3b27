"""A rank of a job that stands still at one step: `python desynchronised.py CULPRIT HOW STEP`, with gloo."""

import hashlib
import os
import queue
import re
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

CULPRIT, HOW, STEP = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
# From that step on, the limit of each collective, and of a barrier before it; 0: none.  Earlier steps may be slow.
LIMIT_S = float(os.environ.get("DESYNCHRONISED_LIMIT_S", "0"))
BARRIER_S = float(os.environ.get("DESYNCHRONISED_BARRIER_S", "0"))
FIFO = os.environ["DESYNCHRONISED_FIFO"]  # that nobody writes to


def spin_in_c() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")  # for years, with the GIL


def hash_in_c() -> None:
    hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)  # for minutes, without it


def spin_in_python() -> None:
    while True:
        pass


def read_a_file() -> None:
    with open(FIFO) as file:
        file.read()


def sleep() -> None:
    time.sleep(3600)


def wait_for_a_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def leave_the_loop() -> None:
    queue.Queue[None]().get()  # as for results of its own evaluation


def take_another_branch() -> None:
    dist.barrier()


DOES = {
    "C": spin_in_c,
    "C without the GIL": hash_in_c,
    "Python": spin_in_python,
    "disk": read_a_file,
    "asleep": sleep,
    "lock": wait_for_a_lock,
    "left": leave_the_loop,
    "branch": take_another_branch,
    "groups": sleep,
}


def wait_for_all() -> None:
    """Returns when all ranks have imported torch, and shows life until then: no limit counts for that."""
    start = f"{FIFO}.{os.environ['TORCHELASTIC_RESTART_COUNT']}."
    open(start + os.environ["RANK"], "w").close()
    while not all(os.path.exists(f"{start}{rank}") for rank in range(int(os.environ["WORLD_SIZE"]))):
        print("waits", flush=True)
        time.sleep(0.1)


def main() -> None:
    wait_for_all()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    halves = [dist.new_group(range(first, size, 2)) for first in (0, 1)]
    limited = dist.new_group(timeout=timedelta(seconds=LIMIT_S)) if LIMIT_S else None
    tensor = torch.ones(1000)
    for step in range(1_000_000):
        if HOW == "groups":
            if (rank, step) == (CULPRIT, STEP):
                DOES[HOW]()
            dist.all_reduce(tensor, group=halves[rank % 2])
        elif (rank, step) == (CULPRIT, STEP):
            DOES[HOW]()
        if BARRIER_S and step >= STEP:
            dist.monitored_barrier(timeout=timedelta(seconds=BARRIER_S))
        dist.all_reduce(tensor, group=limited if step >= STEP else None)
        time.sleep(0.02)


main()
