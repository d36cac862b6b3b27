"""What a running job can be asked for, decided once by its coordinator.  Pure.

- `drain`: nodes are about to go, and all ranks of the job save at one step before they do
"""

__all__ = ["drain"]
