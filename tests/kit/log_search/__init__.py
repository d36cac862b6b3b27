"""A search over the faults of the replicated log: `world` has what may happen next, `search` looks for what must not."""
