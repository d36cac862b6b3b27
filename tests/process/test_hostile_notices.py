"""Any content of the notice file or from the notice command: the agent survives, and other jobs are undisturbed.

A notice file with invalid content is treated as a notice, which here leaves too little time to act on it.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.agents import NEVER_LOGGED
from kit.hostile_input import GARBAGE, LONG_EXAMPLES, TEXTS, Sent, hostile, put
from kit.launching import Job, Launcher
from kit.ports import quiet_port
from kit.waiting import wait_for

from aelastic.agent.requests.notice_sources import notice_of

pytestmark = [
    pytest.mark.usefixtures("warm_stores"),
    pytest.mark.timeout(3600),
    pytest.mark.filterwarnings(LONG_EXAMPLES),
]

WORKS = """
say("start", os.getpid(), restart)
wait_for("go")
"""
# In an agent: it looks at once, and writes a byte for each look; the default time is too short to save.
LOOKS = """
import os
from aelastic.agent.requests import notice_sources

notice_sources.FILE_INTERVAL_S, notice_sources.WRITTEN_S, notice_sources.DEADLINE_S = 0.001, 0.0, 0.5
read, looks = notice_sources._read, os.open("looks", os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def look(path):
    text = read(path)
    os.write(looks, b".")
    return text


notice_sources._read = look
"""
MORE_THAN_A_PIPE = 1 << 18  # bytes: once a program has written these, everything before them has been read
WORDS = st.sampled_from(
    ["drain", "cancel", "0.5", "0", "0.999", "spot", "-1", "1e9", "9" * 30, "nan", "s", "drain 0.2 spot"]
)
NOTICES = GARBAGE | st.lists(WORDS | TEXTS, max_size=5).map(lambda words: " ".join(words).encode(errors="replace"))


def is_followed(data: bytes) -> bool:
    notice = notice_of(data[:4096].decode(errors="replace"))
    return notice is not None and notice.deadline_s is not None and notice.deadline_s >= 1


def start(launch: Launcher, *options: str) -> Job:
    endpoint = "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{quiet_port()}"
    job = launch(WORKS, "--nnodes", "1:2", *endpoint, "--rdzv-conf", "last_call_timeout=0.1", *options, wrapper=LOOKS)
    job.wait_line("start")
    return job


def assert_undisturbed(job: Job) -> None:
    """Checks that the first worker is still there, and ends when it may."""
    (job.folder / "go").touch()
    job.assert_ends()
    assert len(job.wait_line("start")) == 1 and not NEVER_LOGGED.search(job.stderr), job.story


def test_a_job_bears_what_is_in_its_notice_file(launch: Launcher, tmp_path: Path) -> None:
    path, sent = tmp_path / "notice", Sent(lambda: None)
    job = start(launch, "--notice-file", str(path))
    looks = job.folder / "looks"

    def check() -> None:
        assert job.process.poll() is None, job.story

    def seen() -> None:
        before = looks.stat().st_size
        wait_for("it looks", lambda: looks.stat().st_size > before + 1 or job.process.poll() is not None)

    sent = Sent(check)

    @hostile
    @given(st.none() | NOTICES.filter(lambda data: not is_followed(data)))
    def write(data: bytes | None) -> None:
        if data is None:
            path.unlink(missing_ok=True)
        else:
            put(path, data)
        seen()
        sent.add(data or b"no file")

    write()
    put(path, b"drain 0.25 the last of all")
    wait_for(lambda: f"the last is heard\n{job.story}", lambda: "0.25 s" in job.stderr)
    path.unlink()
    seen()
    assert_undisturbed(job)


def test_a_job_bears_what_its_notice_command_says(launch: Launcher, tmp_path: Path) -> None:
    printed = list[bytes]()

    @hostile
    @given(NOTICES, st.sampled_from([b"\n", b"\n", b"\r\n", b"\0\n", b""]))
    def draw(data: bytes, end: bytes) -> None:
        printed.append(data + end)

    draw()
    lines = [line for line in b"".join(printed).split(b"\n") if not is_followed(line)]
    path = tmp_path / "said"
    path.write_bytes(b"\n".join(lines) + b"\n" * MORE_THAN_A_PIPE)
    job = start(launch, "--notice-command", f"cat {shlex.quote(str(path))}; touch heard; sleep 1000")
    wait_for("all is heard", lambda: (job.folder / "heard").exists() or job.process.poll() is not None)
    assert_undisturbed(job)
