"""How thorough a run of the tests is: `TEST_EFFORT` is `quick` (the default, `make test`), `all` or `soak`."""

from __future__ import annotations

import os

EFFORT = os.environ.get("TEST_EFFORT", "quick")
_OF = {"quick": 0, "all": 1, "soak": 2}[EFFORT]

# How often a story that takes seconds is repeated; two runs meet each kind of turn, six each kind of cut.
REPETITIONS = (2, 6, 20)[_OF]
WAKE_UPS = (5, 60, 60)[_OF]  # orders in which a suspended machine receives what arrived meanwhile
# Events after a failure at which the network is cut; the verdict exists before the last.
CUT_AT = (range(30, 40, 6), range(48), range(48))[_OF]
SIMULATION_SEEDS = (20, 500, 5000)[_OF]
BABBLE_SEEDS = (30, 990, 9990)[_OF]
DRAIN_SEEDS = (4, 125, 1250)[_OF]  # with each fault
IN_PLACE_SEEDS = (20, 500, 5000)[_OF]
ENDPOINTS_SEEDS = (5, 100, 5000)[_OF]
CLAIM_SEEDS = (1, 3, 3)[_OF]  # with each fault at each write
BAD_NODE_JOBS = (30, 4_000, 10_000)[_OF]
AGENTS = ((100, 400), (1000, 4000), (1000, 4000))[_OF]  # of the jobs whose costs are compared
SPENT_JOBS = (10, 200, 2000)[_OF]
QUORUM_SEEDS = (20, 400, 100_000)[_OF]
LOG_WALKS, LOG_STATES = ((40, 3_000), (500, 60_000), (20_000, 120_000))[_OF]  # of each kind of world
LOG_BREAK_WALKS = (0, 4_000, 4_000)[_OF]  # with each broken rule
HOSTILE_INPUTS = (40, 10_000, 100_000)[_OF]  # at each socket and file
HOSTILE_MOMENTS = (2, 14, 70)[_OF]  # at which an endpoint holds other data for longer than a lease
HOSTILE_LAUNCHES = (4, 300, 3000)[_OF]  # of agents, each in another environment
ATTACKS = (1, 30, 500)[_OF]  # on each kind of endpoint
FIRST_MOMENTS = (4, 20, 200)[_OF]  # forked workers that are asked to end as soon as they exist
EVERYWHERE_S = (0.01, 3.2, 3.2)[_OF]  # of the beginning of a job, in which each fault is tried at each step
FRAMEWORK_KILLS = (5, 5, 50)[_OF]  # of ranks, in jobs of each framework that owns the training loop
KILLS, KILLED_JOBS = ((4, 1), (20, 1), (100, 10))[
    _OF
]  # of ranks in each job that recovers in place; and the number of such jobs
KILLS_AT_START = (5, 20, 200)[_OF]  # of ranks while the others are in `init_process_group`
ROUNDS_IN_PLACE = (10, 10, 200)[_OF]  # that one process takes part in
# Nothing is warm in a soak: each interpreter is started, as a user's is (`kit.warm.interpreters`).
IS_COLD = EFFORT == "soak"


def examples(count: int) -> int:
    """How many examples Hypothesis generates for a test that has `count` of them in a thorough run."""
    return (max(count // 8, 20), count, count * 20)[_OF]
