"""A TCPStore that belongs to no agent: prints its port, and serves until its stdin ends."""

import sys

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch exports it by hand

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
