"""torch's agent as a class, under the name that programs import; defined in `aelastic.compat.elastic_agent`."""

from aelastic.compat.elastic_agent import LocalElasticAgent, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState

__all__ = ["LocalElasticAgent", "RunResult", "Worker", "WorkerGroup", "WorkerSpec", "WorkerState"]
