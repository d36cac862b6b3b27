"""`stories/hang_comparison.txt` covers them; these tests: the words that start one or blame a peer."""

from __future__ import annotations

import pytest
from kit.stories.coordinator import failure

from aelastic.agent.hang_comparisons import is_collective_timeout
from aelastic.diagnose.failures.exit_reason import describe_exit
from aelastic.diagnose.failures.failure import ProcessFailure


@pytest.mark.parametrize(
    "message, is_one",
    [
        (
            "RuntimeError: [/x/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 3000ms for recv operation",
            True,
        ),
        ("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=24, OpType=ALLREDUCE) ran for", True),
        ("RuntimeError: NCCL operation timed out", True),
        ("RuntimeError: Work timed out during finalize", True),
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


# The format of torch 2.15, from its source: nccl2 could not be run here.
LOGGED = "[rank0]:[E1129 12:00:00.123456789 ProcessGroupNCCL.cpp:1234] [TC][rank=0][name=default] "
ABORTS = f"{LOGGED}Aborting process on rank 0 due to "
TIMED_OUT = [
    "timeout - timeout watchdog detected operation timeout",  # logged by its own thread
    "timeout - collective operation timed out",  # logged by the next collective
]
LOST_PEER = "error - nccl hit async error: remote process exited or there was a network error"
HANDLED = 'Traceback (most recent call last):\n  File "train.py", line 3, in load\nOSError: retried\n'


@pytest.mark.parametrize("reason", TIMED_OUT)
@pytest.mark.parametrize("before", ["step 7\n", f"step 7\n{HANDLED}"])
@pytest.mark.parametrize("after", ["", "\n", "\nFatal Python error: Aborted\n\nThread 0x1 (most recent call first):\n"])
@pytest.mark.parametrize("code", [-6, 134])
def test_nccl2_logs_why_it_aborts(before: str, reason: str, after: str, code: int) -> None:
    known = ProcessFailure(0, 77, code, "", stderr_tail=f"{before}{ABORTS}{reason}{after}")
    assert known.headline == f"{describe_exit(code)}; last output: Aborting process on rank 0 due to {reason}"
    assert is_collective_timeout(known) and not known.names_lost_peer


def test_nccl2_logs_that_it_aborts_because_of_a_lost_peer() -> None:
    known = ProcessFailure(0, 77, -6, "", stderr_tail=f"{ABORTS}{LOST_PEER}\n")
    assert known.names_lost_peer and not is_collective_timeout(known)


@pytest.mark.parametrize("code", [-9, 1])
def test_a_worker_that_did_not_abort_is_judged_by_its_end(code: int) -> None:
    known = ProcessFailure(0, 77, code, "", stderr_tail=f"{ABORTS}{TIMED_OUT[0]}\n")
    assert known.message == describe_exit(code)
    assert not is_collective_timeout(known)


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
def test_who_died_of_a_peer_reports_it(message: str, names_one: bool) -> None:
    assert failure("a", 1, message).names_lost_peer == names_one
