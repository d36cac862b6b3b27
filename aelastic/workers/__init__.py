"""Worker processes of this machine.

`functions` runs a function in a child, `affinity` and `numa` choose its CPUs by the `topology`, `guard` is the process
that cleans up if the agent dies.
"""

__all__ = ["affinity", "functions", "guard", "topology"]
