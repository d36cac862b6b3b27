"""Why a worker failed: one value, from the end of its process to the report.

`failure` is that value; `exit_reason` reads the tail of stderr and the exit code, `oom` asks the cgroup, `error_file`
reads and writes torch's files, `report` is the final text.
"""

__all__ = ["error_file", "exit_reason", "failure", "oom", "report"]
