"""What works beside a run: it reads event logs and the status JSON, and needs no agent.

- `timeline`: a picture and a trace of a run
- `spent`: what a run's time was spent on
- `rehearse`: how a job would fare under faults, tried before it runs
"""

__all__: list[str] = []
