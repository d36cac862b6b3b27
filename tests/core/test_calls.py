"""Invalid arguments to `Supervisor` and to rendezvous settings are refused with a message when they are passed."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest

from aelastic import Observer, Supervisor, WorkerSpec
from aelastic.errors import InputError
from aelastic.observe.run_events import RunEvent
from aelastic.rdzv.settings import RendezvousSettings

SPEC = WorkerSpec(entrypoint="true")
ANY: Callable[..., Supervisor] = Supervisor  # also accepts values of the wrong type
SETTINGS: Callable[..., RendezvousSettings] = RendezvousSettings


class Plain:
    """Looks like an observer, but is not one."""

    def tell(self, event: RunEvent, now: float) -> None: ...


@pytest.mark.parametrize(
    "passed, words",
    [
        ({"spec": "train.py"}, "spec is 'train.py': use a WorkerSpec; for a script, WorkerSpec(entrypoint="),
        ({"spec": None}, "spec is None: use a WorkerSpec"),
        ({"spec": "x" * 900}, f"spec is '{'x' * 59}...: use a WorkerSpec"),
        ({"observers": Plain()}, "Plain object at 0x"),
        ({"observers": None}, "observers is None: use a list or tuple of observers"),
        ({"observers": [Observer]}, "class is derived from Observer"),
        ({"observers": [Plain()]}, "observers[0] is <"),
        ({"backend": "local"}, "backend is 'local': use an object whose class is derived from WorkerBackend, or None"),
        (
            {"health_check_server": 8080},
            "health_check_server is 8080: use a HealthCheckServer, or a function that makes one",
        ),
    ],
)
def test_a_supervisor_takes_no_argument_of_another_type(passed: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)) as caught:
        ANY(**{"spec": SPEC, **passed})
    assert "\n" not in str(caught.value)


def test_what_is_asked_of_a_supervisor_is_judged_before_a_run_receives_it() -> None:
    supervisor: Any = Supervisor(SPEC)
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: supervisor.drain("soon"), "deadline_s is 'soon': use a number"),
        (lambda: supervisor.drain(None), "deadline_s is None: use a number"),
        (lambda: supervisor.drain(-1), "deadline_s is -1: use seconds, 0 or more"),
        (lambda: supervisor.drain(10, 3), "reason is 3: use a str"),
        (lambda: supervisor.stop("TERM"), "signum is 'TERM': use the number of a signal, as in signal.SIGTERM"),
        (lambda: supervisor.send_signal(0), "signum is 0: use the number of a signal"),
    ]
    for call, words in calls:
        with pytest.raises(InputError, match=re.escape(words)):
            call()
    supervisor.stop(signal.SIGINT)


async def test_so_is_what_is_awaited() -> None:
    supervisor: Any = Supervisor(SPEC)
    for call, words in (
        (supervisor.restart(3), "reason is 3: use a str"),
        (supervisor.stop_job(at_save_s="soon"), "at_save_s is 'soon': use a number, or None"),
        (supervisor.collect_stacks(3), "why is 3: use a str"),
    ):
        with pytest.raises(InputError, match=re.escape(words)):
            await call


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"backend": 3}, "backend is 3: use a str"),
        ({"endpoint": 29400}, "endpoint is 29400: use a str"),
        ({"min_nodes": "2"}, "min_nodes is '2': use an int"),
        ({"max_nodes": 1.5}, "max_nodes is 1.5: use an int"),
        ({"node_rank": "0"}, "node_rank is '0': use an int, or None"),
        ({"local_addr": 3}, "local_addr is 3: use a str, or None"),
        ({"config": "lease=3"}, "config is 'lease=3': use a dict"),
        ({"config": {3: "3"}}, "config has the key 3: use a str"),
        ({"config": {"lease": []}}, "rendezvous setting lease=[]: use a number above 0"),
        ({"secret_file": 3}, "secret_file is 3: use a Path, or None"),
        ({"admit_s": "3"}, "admit_s is '3': use a number"),
        ({"bind_all": "no"}, "bind_all is 'no': use a bool"),
    ],
)
def test_settings_of_a_rendezvous_take_no_value_of_another_type(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(words)):
        SETTINGS(**{"backend": "c10d", "endpoint": "localhost:29400", **fields})


@pytest.mark.parametrize("value", [object(), 3.5, "x", b"x", [], {}, print, None])
def test_no_value_of_any_field_raises_anything_else(value: object) -> None:
    for name in RendezvousSettings.__match_args__:
        try:
            SETTINGS(**{"backend": "c10d", "endpoint": "localhost:29400", name: value})
        except InputError:
            pass
