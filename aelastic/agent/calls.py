"""What a program may pass to a `Supervisor`: each call checks its arguments before it does anything else."""

from __future__ import annotations

import signal
from typing import Any

from aelastic.base.setting import SECONDS, STR, Rule, in_words, is_int, is_sequence, optional, rule
from aelastic.errors import InputError
from aelastic.observe.observer import Observer
from aelastic.spec import WorkerSpec
from aelastic.workers.backend import WorkerBackend

# How much of a value a message shows: values may be large.
VALUE_CHARS = 60


def _shown(value: Any) -> str:
    words = in_words(value)
    return words if len(words) <= VALUE_CHARS else f"{words[:VALUE_CHARS]}..."


def _is_server(value: Any) -> bool:
    return callable(value) or (hasattr(value, "start") and hasattr(value, "stop"))


_OBSERVER = rule(lambda value: isinstance(value, Observer), "use an object whose class is derived from Observer")
RULES: dict[str, Rule] = {
    "spec": rule(
        lambda value: isinstance(value, WorkerSpec),
        "use a WorkerSpec; for a script, WorkerSpec(entrypoint=sys.executable, args=('train.py',))",
    ),
    "backend": optional(
        rule(lambda value: isinstance(value, WorkerBackend), "use an object whose class is derived from WorkerBackend")
    ),
    "observers": rule(is_sequence, "use a list or tuple of observers"),
    "health_check_server": optional(rule(_is_server, "use a HealthCheckServer, or a function that makes one")),
    "reason": STR,
    "why": STR,
    "deadline_s": SECONDS,
    "at_save_s": optional(SECONDS),
    "signum": rule(
        lambda value: is_int(value) and 1 <= value < signal.NSIG, "use the number of a signal, as in signal.SIGTERM"
    ),
}


def check(**passed: Any) -> None:
    """Rejects arguments that cannot work.

    Raises:
        InputError: names the argument and the value to use.
    """
    for name, value in passed.items():
        if remedy := RULES[name](value):
            raise InputError(f"{name} is {_shown(value)}: {remedy}")


def check_observers(observers: Any) -> None:
    """Rejects anything but a list of observers.

    Raises:
        InputError: names the first item that is not an observer.
    """
    check(observers=observers)
    for place, each in enumerate(observers):
        if remedy := _OBSERVER(each):
            raise InputError(f"observers[{place}] is {_shown(each)}: {remedy}")
