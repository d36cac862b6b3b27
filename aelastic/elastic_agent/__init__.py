"""torch's agent and its processes as classes, for programs that use or subclass them, over a `Supervisor`.

    LocalElasticAgent(spec, logs_specs).run()       # torch.distributed.elastic.agent.server
    start_processes("trainer", "python", args, envs, logs_specs).wait()   # torch.distributed.elastic.multiprocessing

`agent` runs a job and returns its result; `worker_group` has what it is described by; `pcontext` runs processes of this
node alone.  What of torch's classes is not here, and why: docs/how-to/from-torchrun.md.
"""

from aelastic.elastic_agent.agent import LocalElasticAgent
from aelastic.elastic_agent.pcontext import PContext, RunProcsResult, start_processes
from aelastic.elastic_agent.worker_group import Worker, WorkerGroup, WorkerSpec
from aelastic.group.events import WorkerState
from aelastic.result import RunResult

__all__ = [
    "LocalElasticAgent",
    "PContext",
    "RunProcsResult",
    "RunResult",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "start_processes",
]
