"""The health gate: which checks keep a node out, and that a broken check keeps none out."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest
from kit.launching import Launcher, run
from kit.ports import quiet_port
from kit.verbs import verb
from kit.waiting import wait_for

from aelastic.agent import health_gate
from aelastic.agent.health_gate import BUILT_IN, HealthGate, fatal_xid, holder
from aelastic.base.host import proc_table

pytestmark = pytest.mark.usefixtures("warm_stores")

MARK = "NOBODY_HAS_THIS=1"
FLOOD = "while :; do echo flood; done"
BROKEN = {
    "not there": "no-such-check --all",
    "no program": "./data",
    "not executable": "./locked",
    "a crash": "kill -SEGV $$",
    "killed": "kill -KILL $$",
    "an exception": "exit 1",
    "another code": "exit 3",
    "floods stdout": FLOOD,
    "floods stderr": f"({FLOOD}) >&2",
    "says unfit on stderr, and nothing else": "echo 'GPU 3 is unfit: exit 2' >&2; exit 255",
}
HANGS = {"by itself": "sleep 600", "with a child": "sleep 600 & wait"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LOOK_AGAIN_S", 0.01), ("HELD_S", 0.1), ("_uptime_s", lambda: 1e6)):
        monkeypatch.setattr(health_gate, name, value)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for checks that never answer: on a busy machine, one that answers may take longer than this."""
    monkeypatch.setattr(health_gate, "LIMIT_S", 0.2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").write_bytes(b"\x7fELF, but no program")
    (tmp_path / "data").chmod(0o755)
    (tmp_path / "locked").write_text("exit 2")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def looks(*commands: str, folder: Path, times: int = 1) -> list[str]:
    """Lets one gate per command look `times` times, at the same time; returns their last answers."""
    found = dict.fromkeys(range(len(commands)), "?")

    async def look(place: int, command: str) -> None:
        gate = HealthGate(command, dict(os.environ), MARK, folder)
        for _ in range(times):
            found[place] = await gate.look()
        gate.close()

    async def all_of_them() -> None:
        async with anyio.create_task_group() as tasks:
            for place, command in enumerate(commands):
                tasks.start_soon(look, place, command)

    run("uvloop", all_of_them())
    return list(found.values())


COULD_NOT_DECIDE = "the health check failed to decide, so this node is treated as fit: "


def test_a_check_that_is_broken_keeps_no_node_out_and_is_reported_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Several nodes look at the same time, twice each."""
    assert looks(*BROKEN.values(), folder=folder, times=2) == [""] * len(BROKEN)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(BROKEN) and all(line.startswith(COULD_NOT_DECIDE) for line in messages), messages
    assert "took more than" not in caplog.text


@pytest.mark.usefixtures("short_limit")
def test_a_check_that_hangs_keeps_no_node_out_and_is_reported_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert looks(*HANGS.values(), folder=folder, times=2) == ["", ""]
    assert [record.getMessage() for record in caplog.records] == [f"{COULD_NOT_DECIDE}took more than 0.2 s"] * 2


FIT_OR_NOT = {
    "true": "",
    "echo all is well; echo really >&2": "",
    "exit 2": "the health check exited with 2",
    "echo GPU 3: 2 rows failed to remap; echo more; exit 2": "GPU 3: 2 rows failed to remap",
    "echo noise >&2; exit 2": "the health check exited with 2",
    BUILT_IN: "",
}


def test_a_check_shows_whether_a_node_is_fit(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert looks(*FIT_OR_NOT, folder=folder) == [*FIT_OR_NOT.values()] and not caplog.records


@pytest.mark.parametrize(
    "line, found",
    [
        ("4,1,1,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "Xid 79 of PCI:0000:3b:00"),
        ("NVRM: Xid (PCI:0000:3b:00): 48, DBE", "Xid 48 of PCI:0000:3b:00"),
        ("NVRM: Xid (PCI:0000:3b:00): 13, Graphics Exception", ""),  # caused by the program itself
        ("NVRM: Xid (PCI:0000:3b:00): 31, MMU Fault", ""),
        ("nvidia-nvswitch0: SXid (PCI:0000:08:00.0): 20034, Fatal, Link 30", "SXid 20034 of PCI:0000:08:00.0"),
        ("nvidia-nvswitch0: SXid (PCI:0000:08:00.0): 12028, Non-fatal, Link 30", ""),
        ("usb 1-1: new device", ""),
    ],
)
def test_the_kernels_log_tells_of_devices_that_are_lost(line: str, found: str) -> None:
    assert fatal_xid(line) == found


def test_a_disk_that_is_full_is_seen_twice_or_it_was_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full, room = SimpleNamespace(f_bavail=1, f_blocks=1 << 20, f_frsize=4096), os.statvfs(folder)
    seen = [full, full]
    monkeypatch.setattr(os, "statvfs", lambda _: seen.pop(0) if seen else room)
    assert looks(BUILT_IN, folder=folder) == [f"0 MiB are left in {folder}"]
    seen[:] = [full]
    assert looks(BUILT_IN, folder=folder) == [""]
    seen[:] = [full, full]
    monkeypatch.setattr(health_gate, "_uptime_s", lambda: 60.0)
    assert looks(BUILT_IN, folder=folder) == [""], "the machine is still booting"
    monkeypatch.setattr(health_gate, "_uptime_s", lambda: 1e6)
    seen[:] = [SimpleNamespace(f_bavail=12_000, f_blocks=16_384, f_frsize=4096)] * 2  # /dev/shm of a container: 64 MiB
    assert looks(BUILT_IN, folder=folder) == [""], "small, but not full"


@pytest.mark.usefixtures("short_limit")
def test_a_disk_that_does_not_answer_keeps_no_node_out(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(os, "statvfs", lambda _: answers.wait())
    assert looks(BUILT_IN, folder=folder) == [""]
    answers.set()


def test_a_process_that_still_holds_a_device_is_awaited(folder: Path) -> None:
    async def held() -> tuple[str, str, str]:
        process = await anyio.open_process(
            ["sleep", "600"], env={**os.environ, "HAS": "mark-7"}, stdin=None, start_new_session=True
        )
        try:
            # The kernel shows the environment at the end of `execve`, but reports the program as started before that.
            wait_for("it has its environment", lambda: proc_table.carries(process.pid, b"HAS=mark-7"))
            some, no_worker, of_worker = ("/dev/null",), holder(b"HAS=mark-7", (), ("/dev/nvidia",)), {process.pid}
            return holder(b"HAS=mark-7", (), some), no_worker, holder(b"HAS=mark-7", of_worker, some)
        finally:
            process.kill()
            await process.aclose()

    found, *none = run("asyncio", held())
    assert found.endswith("of an earlier generation holds /dev/null") and none == ["", ""]


# In jobs.


FIT_SOON = """
from aelastic.agent import health_gate
health_gate.AGAIN_MIN_S = 0.2
"""


def test_a_node_that_is_unfit_starts_nothing_until_it_is_fit(launch: Launcher) -> None:
    check = "test -e fit || { echo the fan stands still; exit 2; }"
    job = launch("say('start')\n", "--health-check", check, wrapper=FIT_SOON)
    wait_for("it is looked at twice", lambda: job.stderr.count("this node is unfit: the fan stands still;") >= 2)
    assert not job.stdout
    (job.folder / "fit").touch()
    assert job.wait() == 0 and job.lines == ["start"]
    job.assert_nothing_left()


def test_a_node_that_stays_unfit_leaves_with_the_code_for_another_try(launch: Launcher) -> None:
    wrapper = FIT_SOON + "from aelastic.rdzv import settings\nsettings.JOIN_TIMEOUT_S = 0.3\n"
    job = launch("say('start')\n", "--health-check", "exit 2", wrapper=wrapper)
    assert job.wait() == 75 and not job.stdout, job.story
    assert "this node is unfit, for 0.3 s now: the health check exited with 2" in job.stderr


WORKER = """
say("round", os.environ["GROUP_WORLD_SIZE"])
open("../said-" + os.environ["RANK"], "w").close()
if os.path.exists("sick"):
    while not all(os.path.exists(f"../said-{rank}") for rank in range(3)):
        time.sleep(0.01)
    os.rename("sick", "unfit")
    raise ValueError("bad memory")
while not os.path.exists("../end"):
    time.sleep(0.01)
"""


def test_after_a_failure_the_others_continue_without_a_node_that_is_unfit_and_it_comes_back(launch: Launcher) -> None:
    rendezvous = "--nnodes", "2:3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{quiet_port()}"
    options = *rendezvous, "--rdzv-id", "fit", "--max-restarts", "3", "--rdzv-conf", "last_call_timeout=30"
    check = "! test -e unfit || { echo row 3 does not remap; exit 2; }"
    (launch.folder / "n1").mkdir()
    (launch.folder / "n1" / "sick").touch()
    jobs = [launch(WORKER, *options, "--health-check", check, name=f"n{i}", wrapper=FIT_SOON) for i in range(3)]
    for job in (jobs[0], jobs[2]):
        job.wait_line("round 2")
    unfit = "this node is unfit: row 3 does not remap; it takes part in no round"
    wait_for("it says why", lambda: unfit in jobs[1].stderr)  # a thread writes, and may be late
    assert "unfit: row 3 does not remap" in verb(jobs[1].folder, "status").out
    (launch.folder / "n1" / "unfit").unlink()
    for job in jobs:
        job.wait_line("round 3", 2)
    (launch.folder / "end").touch()
    assert [job.wait() for job in jobs] == [0, 0, 0]
    assert [jobs[0].lines, jobs[1].lines] == [["round 3", "round 2", "round 3"], ["round 3", "round 3"]]
    for job in jobs:
        job.assert_nothing_left()
