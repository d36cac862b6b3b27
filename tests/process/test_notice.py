"""`aelastic.notice` in a worker, and its shared page from both ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.launching import ran
from kit.waiting import DEADLINE_S

from aelastic.agent.channels import NoticePages
from aelastic.training.notice.page import CALLS, FROZEN, NONE, PAGE_VARIABLE, SAVE, attach

LOOP = """
import os, sys
from aelastic import notice
from aelastic.training.notice import page
for line in sys.stdin:
    if line == "fork\\n":
        pid = os.fork()
        if not pid:
            print("child", notice.due(), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
    elif line == "saved\\n":
        print("parks", flush=True)
        notice.saved()
        print("goes on", flush=True)
    elif line == "commit\\n":
        page.renew()
        page.commit(7)
        print("committed", flush=True)
    else:
        print(notice.due(), flush=True)
"""


class Worker:
    """A process that obeys commands."""

    def __init__(self, path: str | None) -> None:
        env = {name: value for name, value in os.environ.items() if name != PAGE_VARIABLE}
        self._process = subprocess.Popen(
            [sys.executable, "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=env if path is None else {**env, PAGE_VARIABLE: path},
        )  # fmt: skip
        os.set_blocking(self._process.stdout.fileno(), True)  # type: ignore[union-attr]

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def receive(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def due(self) -> str:
        self.send("due")
        return self.receive()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def pages(tmp_path: Path) -> Iterator[NoticePages]:
    pages = NoticePages(tmp_path)
    yield pages
    pages.close()


@pytest.fixture
def worker(pages: NoticePages) -> Iterator[Worker]:
    worker = Worker(pages.begin(1, [0])[0])
    yield worker
    worker.close()


def test_without_an_agent_nothing_is_due() -> None:
    worker = Worker(None)
    assert [worker.due(), worker.due()] == ["False", "False"]
    worker.send("saved")
    assert [worker.receive(), worker.receive()] == ["parks", "goes on"]
    worker.close()


def test_a_worker_that_recovers_in_place_and_commits_its_steps_has_not_asked(
    pages: NoticePages, worker: Worker
) -> None:
    worker.send("commit")
    assert worker.receive() == "committed"
    assert pages.steps() == {0: 7} and pages.calls() == {}


def test_a_worker_that_has_asked_in_the_last_round_will_ask_in_this_one(pages: NoticePages, worker: Worker) -> None:
    worker.due()
    pages.begin_round()
    worker.send("commit")
    assert worker.receive() == "committed" and pages.calls() == {0: 0}


def test_calls_are_counted_and_the_named_one_is_due(pages: NoticePages, worker: Worker) -> None:
    assert pages.calls() == {}
    assert [worker.due() for _ in range(3)] == ["False"] * 3 and pages.calls() == {0: 3}
    pages.set_phase(FROZEN)
    worker.send("due")
    while pages.calls() != {0: 4}:
        pass
    pages.set_phase(SAVE, 5)
    assert worker.receive() == "False" and pages.saved() == set()
    assert worker.due() == "True"
    worker.send("saved")
    assert worker.receive() == "parks"
    while not pages.saved():
        pass
    pages.set_phase(NONE)
    assert worker.receive() == "goes on" and worker.due() == "False"


def test_another_call_that_is_named_while_a_rank_waits_lets_it_continue(pages: NoticePages, worker: Worker) -> None:
    worker.due()
    pages.set_phase(SAVE, 2)
    assert worker.due() == "True"
    worker.send("saved")
    assert worker.receive() == "parks"
    pages.set_phase(FROZEN)
    assert pages.save_at == 2, "it is parked there"
    pages.set_phase(SAVE, 3)
    assert worker.receive() == "goes on" and pages.saved() == set()
    assert worker.due() == "True"


def test_ranks_that_are_held_or_have_saved_wait_until_the_time_for_that_is_over(
    pages: NoticePages, worker: Worker
) -> None:
    def waiting(now: float, *, are_ending: bool = False) -> list[int]:
        return sorted(pages.waiting(now, are_ending=are_ending))

    worker.due()
    assert waiting(0.0) == []
    pages.set_phase(FROZEN, kill_at=60.0)
    assert (waiting(59.9), waiting(60.0)) == ([0], [])
    pages.set_phase(SAVE, 2, kill_at=60.0)
    assert (waiting(59.9), waiting(59.9, are_ending=True)) == ([], [0]), "it has yet to arrive and save"
    assert worker.due() == "True" and waiting(59.9) == []
    worker.send("saved")
    assert worker.receive() == "parks"
    while not pages.saved():
        pass
    assert (waiting(59.9), waiting(60.0)) == ([0], [])
    pages.set_phase(NONE)
    assert waiting(0.0) == []


def test_a_script_that_continues_has_saved(pages: NoticePages, worker: Worker) -> None:
    pages.set_phase(SAVE, 1)
    assert [worker.due(), worker.due()] == ["True", "False"]
    assert pages.saved() == {0}


def test_a_forked_process_counts_nothing(pages: NoticePages, worker: Worker) -> None:
    worker.due()
    worker.send("fork")
    assert worker.receive() == "child False" and pages.calls() == {0: 1}
    assert worker.due() == "False" and pages.calls() == {0: 2}


def test_a_second_process_of_a_worker_has_no_page(pages: NoticePages, worker: Worker, tmp_path: Path) -> None:
    worker.due()
    other = Worker(str(tmp_path / "notice_1_0"))
    pages.set_phase(SAVE, 2)
    assert other.due() == "False" and pages.calls() == {0: 1}
    other.close()


@pytest.mark.parametrize("harm", ["cut", "overwritten", "negative", "removed"])
def test_a_page_that_the_script_destroys_harms_nobody_else(pages: NoticePages, tmp_path: Path, harm: str) -> None:
    path = Path(pages.begin(1, [0])[0])
    if harm == "cut":
        os.truncate(path, 3)
    elif harm == "overwritten":
        path.write_bytes(b"x" * 64)
    elif harm == "negative":
        with path.open("r+b") as file:
            file.seek(8 * CALLS)
            file.write(b"\xff" * 8)
    else:
        path.unlink()
    pages.set_phase(FROZEN)
    assert pages.calls() == {}
    pages.set_phase(SAVE, 1)
    assert pages.saved() == set()
    worker = Worker(str(path))
    assert worker.due() == "False"
    worker.close()


def test_pages_of_an_earlier_generation_are_gone(pages: NoticePages, tmp_path: Path) -> None:
    pages.begin(1, [0, 1])
    paths = pages.begin(2, [0, 1])
    assert sorted(tmp_path.iterdir()) == sorted(Path(path) for path in paths.values())
    words = attach(paths[0])
    assert words is not None and words[CALLS] == 0


def test_where_no_page_can_be_made_workers_have_none(tmp_path: Path) -> None:
    pages = NoticePages(tmp_path / "missing")
    assert pages.begin(1, [0]) == {} and pages.calls() == {} and pages.saved() == set()


def test_a_rank_that_waits_ends_on_sigterm(pages: NoticePages, worker: Worker) -> None:
    pages.set_phase(SAVE, 1)
    assert worker.due() == "True"
    worker.send("saved")
    assert worker.receive() == "parks"
    worker._process.send_signal(signal.SIGTERM)
    assert worker._process.wait(DEADLINE_S) == -signal.SIGTERM


def test_training_scripts_do_not_pay_for_it() -> None:
    code = "import sys; from aelastic import notice; print(*sorted(sys.modules))"
    loaded = ran(sys.executable, "-c", code, check=True).stdout.split()
    assert not {"torch", "asyncio", "anyio", "aiohttp", "typing", "dataclasses"} & {*loaded}
    ours = {"notice", "training", "training.decorator", "training.late", "training.notice", "training.notice.page"}
    assert {name for name in loaded if name.startswith("aelastic.")} == {f"aelastic.{name}" for name in ours}
