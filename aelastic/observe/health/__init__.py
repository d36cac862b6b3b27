"""The HTTP server of an agent: probes, status, metrics, stacks.

`server` answers, at an `address`, within the `limits` of connections; `stacks_endpoint` takes stack dumps for clients.
`foreign_server` runs a server with torch's interface instead, which the program supplies.
"""

__all__ = ["address", "foreign_server", "server", "stacks_endpoint"]
