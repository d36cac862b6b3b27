"""An inquiry is told in `stories/inquiry.txt`; this is by which words it begins, and by which a worker blames a peer."""

from __future__ import annotations

import pytest
from kit.stories.coordinator import failure

from aelastic.agent.inquiry import is_collective_timeout


@pytest.mark.parametrize(
    "message, is_one",
    [
        (
            "RuntimeError: [/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation",
            True,
        ),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=24, OpType=ALLREDUCE) ran for", True),
        ("RuntimeError: [Rank 0]: Rank 2 failed to pass monitoredBarrier in 3000 ms", True),
        ("RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting", True),
        ("torch.distributed.DistStoreError: wait timeout after 300000ms, keys: /default_pg/0//worker_count", True),
        (
            "DistStoreError: Timed out after 301 seconds waiting for clients. 3/4 clients joined.",
            False,
        ),  # nobody to ask
        ("RuntimeError: Connection closed by peer [127.0.0.1]:3545", False),
        ("TimeoutError: the server timed out", False),
        ("ValueError: bad", False),
    ],
)
def test_a_time_out_of_a_collective_is_known_by_its_words(message: str, is_one: bool) -> None:
    assert is_collective_timeout(failure("a", 1, message)) == is_one


@pytest.mark.parametrize(
    "message, names_one",
    [
        ("RuntimeError: Connection closed by peer [127.0.0.1]:3545", True),
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        (
            "RuntimeError: Rank 1 successfully reached monitoredBarrier, but received errors while waiting for send/recv",
            True,
        ),
        ("ValueError: bad", False),
    ],
)
def test_who_died_of_a_peer_says_so(message: str, names_one: bool) -> None:
    assert failure("a", 1, message).names_lost_peer == names_one
