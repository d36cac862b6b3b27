"""Why a worker died, and where one hangs.

- `failures`: a worker's failure as one value, the root cause among several, and the error files of torch
- `stacks`: the stacks of live workers, read from their memory or by py-spy
- `hangs`: the rules by which a worker that makes no progress is found
"""

__all__: list[str] = []
