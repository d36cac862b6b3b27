"""The HTTP server of an agent: probes, status, metrics, stacks.

`server` answers at the `address` that the environment names, within `limits`, with `stacks_endpoint` for stack dumps;
`foreign_server` drives a server that the program brings along.
"""

__all__ = ["foreign_server", "server"]
