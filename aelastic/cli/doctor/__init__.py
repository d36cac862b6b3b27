"""Checks of this host and of the rendezvous endpoints before a job is started: `aelastic doctor`.

`command` runs the checks and prints the findings.  `finding` is a check's result; `host_checks` looks at this host,
`endpoint_checks` at the endpoints, `secret_checks` at who can get in.  Nothing is left behind, and no job is started.
"""

__all__ = ["command", "endpoint_checks", "finding", "host_checks", "secret_checks"]
