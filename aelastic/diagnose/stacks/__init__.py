"""Python stacks of workers.

`collect` reads the memory of workers (`interpreter`, using a `layout` of it; `memory`), and asks py-spy if that fails.
`format` reads and quotes answers, and `places` folds stacks for a comparison of all ranks.  `collectives` asks torch's
flight recorder and NCCL.
"""

__all__ = ["collect", "collectives", "format", "interpreter", "memory", "places"]
