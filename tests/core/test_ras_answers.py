"""Recorded answers of NCCL's RAS, summarized in one line."""

from __future__ import annotations

import pytest

from aelastic.diagnose.stacks.collectives import summary_of_ras

HEAD = """NCCL version 2.27.3 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12040

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... (0.00s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
WELL = f"""{HEAD}    0         1         4         8        32        32   RUNNING      OK

Errors
======

Warnings
========

"""
BEHIND = f"""{HEAD}    0         1         4         8        32        32   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllGather operation counts
  30 ranks have launched up to operation 640
  2 ranks have launched up to operation 641
  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124
  Rank 13 -- GPU 5 managed by process 323033 on node 10.137.190.124

"""
GONE = f"""{HEAD}    0         1         1         1         2         1   RUNNING  INCOMPLETE

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 60004 on node 10.4.109.13 managing GPU 0

#0-0 (b3398875b8b2a063) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 1 -- GPU 0 managed by process 60004 on node 10.4.109.13

Warnings
========

"""

DIFFER = "NCCL RAS: #0-0 MISMATCH: Communicator ranks have different AllGather operation counts"
MISSING = "NCCL RAS: INCOMPLETE: Missing communicator data from 1"
MISSING_0 = "#0-0 INCOMPLETE: Missing communicator data from 1"


@pytest.mark.parametrize(
    "answer, line",
    [
        (WELL, "NCCL RAS: no communicator has a problem"),
        (
            BEHIND,
            f"{DIFFER}; 30 ranks have launched up to operation 640; 2 ranks have launched up to operation 641; rank 12, 13",
        ),
        (
            GONE,
            f"{MISSING} job process; Process 60004 on node 10.4.109.13 managing GPU 0 · {MISSING_0} rank; rank 1",
        ),
        (BEHIND[: BEHIND.index("  30 ranks")], DIFFER),
        ("", ""),
        ("HTTP/1.1 400 Bad Request\r\n\r\n", ""),
        (HEAD[: HEAD.index("Communicators")], ""),
        (f"{HEAD}  Rank 3 -- GPU 4", "NCCL RAS: no communicator has a problem"),
    ],
)
def test_the_problems_that_ras_names_are_one_line(answer: str, line: str) -> None:
    assert summary_of_ras(answer) == line


def test_of_many_problems_some_are_named() -> None:
    blocks = [f"#{number}-0 (fa93) MISMATCH\n  counts differ\n\n" for number in range(9)]
    assert summary_of_ras(HEAD + "".join(blocks)).endswith("#2-0 MISMATCH: counts differ · and 6 more")
