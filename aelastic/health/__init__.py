"""The HTTP server of an agent: probes, status, metrics, stacks."""
