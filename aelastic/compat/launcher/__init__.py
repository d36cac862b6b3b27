"""The launcher as a library: torch's `LaunchConfig`, `elastic_launch` and `run`, on a blocking call.

`launch_config` is torch's config, and the `WorkerSpec` made from it; `elastic_launch` runs one launch, on the loop and
in the thread that `blocking` provides; `errors` has the errors that it raises; `run` is torchrun's parser and
namespace.  Programs import these names from `aelastic.launch` and `aelastic.run`.
"""

__all__ = ["blocking", "elastic_launch", "errors", "launch_config", "run"]
