"""torch's agent as a class, for programs that use or subclass them, over a `Supervisor`.

    LocalElasticAgent(spec, logs_specs).run()       # torch.distributed.elastic.agent.server

`agent` runs a job and returns its result; `worker_group` has the classes that describe it.  For the parts of torch's
classes that are not here, and why: docs/how-to/from-torchrun.md.
"""

from aelastic.agent.group.events import Worker, WorkerState
from aelastic.compat.elastic_agent.agent import LocalElasticAgent
from aelastic.compat.elastic_agent.worker_group import WorkerGroup, WorkerSpec
from aelastic.result import RunResult

__all__ = [
    "LocalElasticAgent",
    "RunResult",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
]
