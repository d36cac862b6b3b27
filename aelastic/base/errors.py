"""The base of all errors that aelastic raises; `aelastic.errors` has the others, and says whose fault each is."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import ClassVar

EXIT_FAILURE = 1
EXIT_INPUT = 2
EXIT_INTERNAL = 70  # EX_SOFTWARE of sysexits.h
EXIT_TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h


class ErrorCategory(Enum):
    """Whose fault an error is, in the terms of torchelastic's documentation."""

    INPUT = "input error"  # a user error: an invalid input to the agent
    WORKER = "worker failure"  # a user error: a worker process failed
    AGENT = "agent failure"  # a platform error: the agent failed
    INFRA = "infra failure"  # neither the agent nor the workers: hosts and networks


class AelasticError(Exception):
    """Base class of all errors that aelastic raises; `category` and `exit_code` tell who is at fault.

    Args:
        topic: the entry of docs/reference/troubleshooting.md that helps, where the message is not enough.
    """

    category: ClassVar[ErrorCategory] = ErrorCategory.AGENT
    exit_code: ClassVar[int] = EXIT_FAILURE
    topic: str | None = None

    def __init__(self, *args: object, topic: str | None = None) -> None:
        super().__init__(*args)
        if topic is not None:
            self.topic = topic


class InternalError(AelasticError):
    """A bug in aelastic.

    Retrying may help.  Please report it, with the trace.

    Args:
        what: what happened.
        trace: the last events before it, oldest first.
    """

    exit_code = EXIT_INTERNAL

    def __init__(self, what: str, trace: Iterable[str] = ()) -> None:
        self.what, self.trace = what, tuple(trace)
        super().__init__(self.what, self.trace)

    @property
    def story(self) -> tuple[str, ...]:
        """Deprecated: the old name of `trace`, until version 0.2."""
        return self.trace

    def __str__(self) -> str:
        return "\n  ".join([f"{self.what} (a bug in aelastic: please report it)", *self.trace])
