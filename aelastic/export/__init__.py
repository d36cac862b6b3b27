"""Observers that send what happens to services of others; each is imported where the environment names its service.

- `trainer`: progress, to Kubeflow's Trainer
- `otel`: rounds and restarts as traces, over OTLP
"""

__all__ = ["otel", "trainer"]
