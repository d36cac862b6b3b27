"""The flight recorder and NCCL's RAS in a hang, with workers and servers that imitate torch and NCCL."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

import anyio
import pytest
from anyio.abc import SocketStream
from kit.launching import Launcher
from kit.waiting import DEADLINE_S

from aelastic.diagnose.stacks.collectives import FlightRecorder, ras_line

# Like torch: a rank makes its pipe when it joins a group, and its watchdog writes the recording.
RECORDS = """
import threading
stem, file = os.environ["TORCH_NCCL_DEBUG_INFO_PIPE_FILE"], os.environ["TORCH_FR_DUMP_TEMP_FILE"]
assert os.environ["TORCH_FR_BUFFER_SIZE"] == "2000"
os.mkfifo(f"{stem}{rank}.pipe")
pipe = os.open(f"{stem}{rank}.pipe", os.O_RDONLY | os.O_NONBLOCK)
def watch():
    while True:
        try:
            if os.read(pipe, 100):
                with open(f"written_{rank}", "w") as dump:
                    dump.write("recorded")
                os.rename(f"written_{rank}", f"{file}{rank}")
                return
        except BlockingIOError:
            pass
        time.sleep(0.1)
threading.Thread(target=watch).start()
if restart == 0:
    open(f"up_{rank}", "w").close()
    wait_for(f"up_{1 - rank}")
    open(f"hangs_{os.getpid()}", "w").close()
    time.sleep(600)
os._exit(0)
"""
HANGS = ("--hang-timeout=1", "--hang-signals=output")
# In an agent: only workers that report it can hang.  Until then they may be starting, which is slow on a busy machine.
ONLY_NAMED = """
import os, time
from aelastic.agent.watches import activity
from aelastic.diagnose.stacks import collectives
collectives.TIMEOUT_S = 20.0  # for ranks to write in, who all do
sizes_of = activity.sizes_of

def sizes_that_grow(places):
    hang = {rank for rank, place in places.items() if os.path.exists(f"hangs_{place.pid}")}
    return {rank: size if rank in hang else time.monotonic_ns() for rank, size in sizes_of(places).items()}

activity.sizes_of = sizes_that_grow
"""


@pytest.mark.all
@pytest.mark.ci
def test_the_flight_recorders_of_all_ranks_are_fired_and_their_files_named(launch: Launcher, tmp_path: Path) -> None:
    options = ("--nproc-per-node=2", "--max-restarts=1", f"--log-dir={tmp_path}/logs")
    job = launch(RECORDS, *HANGS, *options, wrapper=ONLY_NAMED)
    assert job.wait() == 0, job.story
    (folder,) = (tmp_path / "logs" / "latest").resolve().glob("flight_recorder_0")
    assert f"flight recorder: {folder} (2 files)" in job.stderr
    assert [(folder / f"rank_{rank}").read_text() for rank in (0, 1)] == ["recorded"] * 2
    assert (folder.parent / "flight_recorder_1").is_dir()  # of the next generation


@pytest.mark.parametrize("name", ["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
async def test_who_has_chosen_where_to_record_keeps_that(name: str, tmp_path: Path) -> None:
    env = {name: "7"}
    await FlightRecorder().begin(tmp_path / "fr", {0: env})
    assert env == {name: "7"}


async def test_a_rank_that_does_not_write_is_not_waited_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    async def run_at_once(function: Callable[..., Any], *args: Any, **_: Any) -> Any:
        return function(*args)  # a thread may start too late

    recorder = FlightRecorder()
    assert await recorder.line() == ""
    await recorder.begin(tmp_path / "fr", {0: {}})
    monkeypatch.setattr("aelastic.diagnose.stacks.collectives.TIMEOUT_S", 0.1)
    monkeypatch.setattr("aelastic.diagnose.stacks.collectives.run_sync", run_at_once)
    assert await recorder.line() == ""
    os.mkfifo(tmp_path / "fr" / "rank_0.pipe")
    pipe = os.open(tmp_path / "fr" / "rank_0.pipe", os.O_RDONLY | os.O_NONBLOCK)
    assert await recorder.line() == ""
    assert os.read(pipe, 9) == b"1\n"
    os.close(pipe)
    assert await recorder.line() == ""  # it has ended, so nobody can read


# RAS.


class Ras:
    """A server that answers one question and closes, as NCCL's does; or does not answer."""

    def __init__(self, answer: bytes, *, closes: bool = True) -> None:
        self.asked = b""
        self._answer, self.closes = answer, closes
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._listener.accept()[0] as client:
            self.asked = client.recv(100)
            client.sendall(self._answer)
            if not self.closes:
                self._over.wait()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._listener.close()


ANSWER = b"""Communicators... (0.00s)
=============

#0-0 (fa93daea854b060b) MISMATCH
  Communicator ranks have different AllReduce operation counts
  1 ranks have launched up to operation 640
  Rank 1 -- GPU 4 managed by process 323032 on node 10.137.190.124
"""
LINE = (
    "NCCL RAS: #0-0 MISMATCH: Communicator ranks have different AllReduce operation counts; "
    "1 ranks have launched up to operation 640; rank 1"
)


@pytest.fixture(params=[True, False], ids=["closes", "stays open"])
def ras(request: pytest.FixtureRequest) -> Iterator[Ras]:
    server = Ras(ANSWER, closes=request.param)
    yield server
    server.close()


class Timed:
    """A connection that runs out of time after it has received part of an answer."""

    def __init__(self, stream: SocketStream, scopes: list[anyio.CancelScope]) -> None:
        self._stream, self._scopes = stream, scopes
        self._has_received = False
        self.send = stream.send

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stream.aclose()

    async def receive(self) -> bytes:
        if self._has_received:
            self._scopes[-1].deadline = anyio.current_time()
        self._has_received = True
        return await self._stream.receive()


def end_when_asked_for_more(monkeypatch: pytest.MonkeyPatch) -> None:
    scopes = list[anyio.CancelScope]()
    connect_tcp, move_on_after = anyio.connect_tcp, anyio.move_on_after

    def keep_scope(_: float) -> anyio.CancelScope:
        scopes.append(move_on_after(DEADLINE_S))
        return scopes[-1]

    async def connect(host: str, port: int) -> Timed:
        return Timed(await connect_tcp(host, port), scopes)

    monkeypatch.setattr(anyio, "move_on_after", keep_scope)
    monkeypatch.setattr(anyio, "connect_tcp", connect)


async def test_ras_is_asked_once_and_what_came_in_time_counts(ras: Ras, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ras.closes:
        end_when_asked_for_more(monkeypatch)
    assert await ras_line({"NCCL_RAS_ADDR": ras.address}) == LINE
    assert ras.asked == b"VERBOSE STATUS\n"


@pytest.mark.parametrize("env", [{"NCCL_RAS_ADDR": "127.0.0.1:1"}, {"NCCL_RAS_ADDR": "x"}, {"NCCL_RAS_ENABLE": "0"}])
async def test_where_no_ras_answers_nothing_is_logged(env: dict[str, str]) -> None:
    assert await ras_line(env) == ""


@pytest.mark.all
def test_in_a_hang_what_ras_says_is_logged(launch: Launcher) -> None:
    ras = Ras(ANSWER)
    code = "if restart == 0:\n    open(f'hangs_{os.getpid()}', 'w').close()\n    time.sleep(600)"
    env = {"NCCL_RAS_ADDR": ras.address}
    job = launch(code, *HANGS, "--max-restarts=1", env=env, wrapper=ONLY_NAMED)
    assert job.wait() == 0, job.story
    assert re.search(rf"aelastic: W {re.escape(LINE)}\n", job.stderr)
    ras.close()
