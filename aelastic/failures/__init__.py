"""Why a worker failed: one value, and what it is made of.

- `failure`: `ProcessFailure`, from the end of the process to the report on every node; and the file in which a process
  records its exception, in torch's format
- `error_handler`: what `record` does with an exception; programs may derive from it
- `exit_reason`: the cause in the end of stderr, and exit codes in words
- `places`: which ranks hang, by where all of them are
- `root_cause`: what tells a failure from another, and what the same one twice proves
- `report`: the final report of a failed job
"""

__all__ = ["error_handler", "exit_reason", "failure", "places", "report", "root_cause"]
