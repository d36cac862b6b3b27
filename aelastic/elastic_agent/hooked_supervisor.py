"""A supervisor whose workers are started through a hook of the faces for torch's classes."""

from __future__ import annotations

from typing import Any

from aelastic.agent.resources import Starter
from aelastic.spec import WorkerSpec
from aelastic.supervisor import Supervisor

SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"  # torch's default of what stops a job


class HookedSupervisor(Supervisor):
    """A `Supervisor` that starts workers by a function of its caller's, which calls the back end.

    Args:
        starter: is awaited with the workers to start, and the back end's `start`.
    """

    def __init__(self, spec: WorkerSpec, starter: Starter, **more: Any) -> None:
        super().__init__(spec, **more)
        self._settings = self._settings.replace(starter=starter)
