"""torch's agent as a class, for programs that use or subclass it, over a `Supervisor`.

    LocalElasticAgent(spec, logs_specs).run()       # torch.distributed.elastic.agent.server

For the parts of torch's classes that are not here, and why: docs/how-to/from-torchrun.md.
"""

from aelastic.compat.elastic_agent.agent import LocalElasticAgent
from aelastic.compat.elastic_agent.worker_group import WorkerGroup, WorkerSpec
from aelastic.result import RunResult
from aelastic.workers.states import Worker, WorkerState

__all__ = ["LocalElasticAgent", "RunResult", "Worker", "WorkerGroup", "WorkerSpec", "WorkerState"]
