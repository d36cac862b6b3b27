"""Notifications to systemd from agents with a notification socket, on which the test listens."""

from __future__ import annotations

import os
import signal
import socket
import uuid
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from kit.backends import FAILS, SUCCEEDS, FakeBackend, StoreStandIn
from kit.launching import Launcher
from kit.virtual_clock import on_virtual_time
from kit.waiting import wait_for

from aelastic import Supervisor, WorkerSpec
from aelastic.observe import run_events as ev
from aelastic.observe.export.systemd import SdNotify
from aelastic.observe.observer import Observers
from aelastic.workers.states import WorkerState

STARTED = ev.WorkersStarted(1, {0: 700})


class Systemd:
    """The other end of a notification socket."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.setblocking(False)
        self.told: list[dict[str, str]] = []

    def take(self) -> list[dict[str, str]]:
        """All notifications so far, one per datagram."""
        while True:
            try:
                text = self.socket.recv(4096).decode()
            except BlockingIOError:
                return self.told
            self.told.append(dict(line.split("=", 1) for line in text.split("\n")))

    def said(self, name: str) -> list[str]:
        return [each[name] for each in self.take() if name in each]

    def wait(self, name: str, count: int = 1) -> list[str]:
        values: list[str] = wait_for(f"{name}, not only {self.told}", lambda: self.said(name)[count - 1 :])
        return values


@pytest.fixture
def systemd(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Systemd]:
    """A socket in a folder, or an abstract one."""
    listening = Systemd(f"@aelastic/{uuid.uuid4()}" if hasattr(request, "param") else str(tmp_path / "notify"))
    with closing(listening.socket):
        yield listening


@pytest.fixture(autouse=True)
def _no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)


# The command line.

WORKER = """
names = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
say("has", *[name for name in names if name in os.environ])
wait_for("go")
"""


@pytest.mark.parametrize("systemd", ["abstract"], indirect=True)
def test_a_service_is_told_when_it_is_ready_how_it_stands_and_that_it_leaves(
    systemd: Systemd, launch: Launcher
) -> None:
    env = {"NOTIFY_SOCKET": systemd.address, "WATCHDOG_USEC": "200000"}
    job = launch(WORKER, "--nproc-per-node", "2", "--shutdown-timeout", "7", env=env)
    systemd.wait("READY")
    systemd.wait("WATCHDOG", 3)
    assert job.wait_line("has", 2) == ["has", "has"]  # and nothing else
    assert "STOPPING" not in {name for each in systemd.take() for name in each}
    job.signal(signal.SIGTERM)
    # Its socket holds few messages: without reading, there would be no room for the last ones.
    wait_for("its end", lambda: systemd.take() and job.process.poll() is not None)
    assert systemd.said("READY") == ["1"]
    assert set(systemd.said("STOPPING")) == {"1"}
    (extension,) = systemd.said("EXTEND_TIMEOUT_USEC")
    assert int(extension) > 7_000_000 + 20_000_000  # SIGTERM, and SIGKILL twice
    statuses = systemd.said("STATUS")
    assert any("running" in status for status in statuses)
    assert statuses[-1] == "STOPPED: the agent was asked to stop (SIGTERM)"
    assert len(statuses) == len(
        [1 for before, after in zip(["", *statuses], statuses, strict=False) if before != after]
    )


def test_a_service_that_ends_by_itself_leaves_without_being_asked(systemd: Systemd, launch: Launcher) -> None:
    job = launch("pass", env={"NOTIFY_SOCKET": systemd.address})
    assert job.wait() == 0
    assert (systemd.said("READY"), systemd.said("STOPPING")) == (["1"], ["1"])
    assert not systemd.said("EXTEND_TIMEOUT_USEC")
    assert not systemd.said("WATCHDOG")


def test_a_socket_without_a_listener_is_logged_once_and_without_a_socket_the_variables_are_the_workers(
    launch: Launcher, tmp_path: Path
) -> None:
    jobs = [
        launch(WORKER, env={"WATCHDOG_USEC": "20000", **more}, name=name)
        for name, more in {"deaf": {"NOTIFY_SOCKET": str(tmp_path / "nothing")}, "none": {}}.items()
    ]
    assert [job.wait_line("has") for job in jobs] == [["has"], ["has WATCHDOG_USEC"]]
    for job in jobs:
        job.go()
        assert job.wait() == 0
    assert [job.stderr.count("cannot notify systemd") for job in jobs] == [1, 0]
    assert "No such file or directory" in jobs[0].stderr


# The library.


async def run(backend: FakeBackend, *observers: SdNotify, **more: Any) -> None:
    await Supervisor(WorkerSpec(entrypoint="train.py", **more), backend=backend, observers=observers).run()


@on_virtual_time
async def test_a_program_that_uses_the_library_speaks_for_itself(
    systemd: Systemd, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", systemd.address)
    await run(FakeBackend([SUCCEEDS]))
    assert systemd.take() == []


@on_virtual_time
async def test_a_restart_is_a_status_and_not_another_start(systemd: Systemd) -> None:
    notify = SdNotify({"NOTIFY_SOCKET": systemd.address}, 30)
    await run(FakeBackend([FAILS], [SUCCEEDS]), notify)
    assert systemd.said("READY") == ["1"]
    statuses = systemd.said("STATUS")
    assert any("restart" in status for status in statuses)
    assert all("\n" not in status and len(status) <= 200 for status in statuses)


@pytest.mark.parametrize(
    "more, count",
    [
        ({"WATCHDOG_USEC": "4000000"}, 6),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": str(os.getpid())}, 6),
        ({"WATCHDOG_USEC": "4000000", "WATCHDOG_PID": "1"}, 0),
        ({"WATCHDOG_USEC": "soon"}, 0),
        ({}, 0),
    ],
    ids=["for no process in particular", "for us", "for another", "nonsense", "off"],
)
@on_virtual_time
async def test_the_watchdog_hears_of_us_twice_in_its_time(more: dict[str, str], count: int, systemd: Systemd) -> None:
    notify = SdNotify({"NOTIFY_SOCKET": systemd.address, **more}, 30)
    await run(FakeBackend([SUCCEEDS]), notify)  # 10 s
    assert len(systemd.said("WATCHDOG")) in ((count, count + 1) if count else (0,))


@on_virtual_time
async def test_what_there_is_no_room_for_is_told_soon_after_or_before_it_closes_and_nothing_waits(
    systemd: Systemd,
) -> None:
    notify = SdNotify({"NOTIFY_SOCKET": systemd.address}, 30)
    observers = Observers([notify])
    crowd = fill(systemd)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(notify.run)
        await anyio.sleep(1)
        observers.tell(STARTED, 0)
        observers.tell(ev.StopAsked(15), 0)
        await anyio.sleep(1)
        assert len(systemd.take()) == crowd
        await anyio.sleep(1)
        (last,) = systemd.take()[crowd:]
        assert (last["READY"], last["STOPPING"]) == ("1", "1")
        crowd += 1 + fill(systemd)
        observers.tell(ev.RunEnded(WorkerState.SUCCEEDED, "it is over"), 0)
        tasks.cancel_scope.cancel()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(notify.aclose)
        await anyio.sleep(1)
        assert len(systemd.take()) == crowd
    assert systemd.take()[crowd:][0]["STATUS"] == "SUCCEEDED: it is over"


@on_virtual_time
async def test_systemd_that_comes_back_is_told_where_we_are(tmp_path: Path) -> None:
    notify = SdNotify({"NOTIFY_SOCKET": str(tmp_path / "late")}, 30)
    observers = Observers([notify])
    observers.tell(STARTED, 0)
    listening = Systemd(str(tmp_path / "late"))
    with closing(listening.socket):
        observers.tell(ev.StopAsked(15), 0)
        assert (listening.said("READY"), listening.said("STOPPING")) == (["1"], ["1"])
        await notify.aclose()


def fill(systemd: Systemd) -> int:
    """Sends until no sender has room left, each with its own limit; returns the number of messages."""
    before = -1
    sent = 0
    while sent > before:
        before = sent
        with (
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as other,
            suppress(BlockingIOError),
        ):
            while True:
                other.sendto(b"X=1", systemd.address)
                sent += 1
    return sent
