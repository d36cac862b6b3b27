"""How thorough a run of the tests is: `TEST_EFFORT` is `quick` (the default, `make test`), `all` or `soak`."""

from __future__ import annotations

import os

EFFORT = os.environ.get("TEST_EFFORT", "quick")
_OF = {"quick": 0, "all": 1, "soak": 2}[EFFORT]

# How often a story is told again where each time takes seconds; each kind of turn is met in two, of cuts in six.
REPETITIONS = (2, 6, 20)[_OF]
WAKE_UPS = (10, 60, 60)[_OF]  # orders in which a machine that was suspended hears what has come meanwhile
# Events after a failure at which the network is cut; the verdict is there before the last.
CUT_AT = (range(28, 40, 3), range(48), range(48))[_OF]
SIMULATION_SEEDS = (100, 500, 5000)[_OF]
ENDPOINTS_SEEDS = (20, 100, 5000)[_OF]
BAD_NODE_JOBS = (300, 4_000, 10_000)[_OF]
SPENT_JOBS = (40, 200, 2000)[_OF]
QUORUM_SEEDS = (50, 400, 100_000)[_OF]
ADVERSARY_S = (2.0, 40.0, 600.0)[_OF]  # of attacks, over all kinds of boards
FIRST_MOMENTS = (4, 20, 200)[_OF]  # forked workers that are asked to end as soon as they are there
EVERYWHERE_S = (0.15, 3.2, 3.2)[_OF]  # of a job's beginning, in which each fault comes at each step
# Nothing is warm in a soak: each interpreter is started, as a user's is (`kit.warm.interpreters`).
IS_COLD = EFFORT == "soak"


def examples(count: int) -> int:
    """How many examples Hypothesis makes of a test that deserves so many in a thorough run."""
    return (max(count // 5, 20), count, count * 20)[_OF]
