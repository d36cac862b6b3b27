"""How all ranks of a round come to the state of the newest whole step."""

from __future__ import annotations

__all__ = ["sharing", "state", "wire"]
