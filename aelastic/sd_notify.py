"""`SdNotify`, for programs that give it to a `Supervisor`: `aelastic.observe.systemd` has it."""

from aelastic.observe.systemd import SdNotify

__all__ = ["SdNotify"]
