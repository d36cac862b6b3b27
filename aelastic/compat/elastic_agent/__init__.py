"""torch's agent as a class: `agent` runs a job and returns its result; `worker_group` has the classes that describe it.

Programs import the names from `aelastic.elastic_agent`.
"""

__all__ = ["agent", "worker_group"]
