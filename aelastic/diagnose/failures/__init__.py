"""Why a worker failed: one value, and how it is obtained.

- `failure`: `ProcessFailure`, from the end of the process to the report on every node; and the file in which a process
  records its exception, in torch's format
- `error_handler`: how `record` handles an exception; programs may derive from it
- `exit_reason`: finds the cause in the tail of stderr, and describes exit codes
- `places`: which ranks hang, judged from where all of them are
- `root_cause`: what distinguishes failures, and what a repeated failure proves
- `report`: the final report of a failed job
"""

__all__ = ["error_handler", "exit_reason", "failure", "places", "report", "root_cause"]
