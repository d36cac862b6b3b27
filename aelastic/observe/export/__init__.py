"""Observers that report to other programs; each is imported only if it is enabled.

- `trainer`: progress, to Kubeflow's Trainer
- `otel`: rounds and restarts as traces, over OTLP
- `textfile`: metrics in a file, for node_exporter
- `systemd`: readiness and status, to systemd
"""

__all__ = ["otel", "systemd", "textfile", "trainer"]
