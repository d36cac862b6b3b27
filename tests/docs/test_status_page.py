"""The page of a running agent, asked as a browser and as a program asks, and opened in headless Chromium."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from kit.launching import Job, Launcher, wait_for
from kit.servers.browser import dom_of

from aelastic.health.page import PAGE, POLICY

SCRIPT = """
say("up", restart)
if (rank, restart) == (1, 0):
    raise ValueError("<img src=x onerror=\\"document.title='owned'\\">")
time.sleep(600)
"""


@pytest.fixture
def job(launch: Launcher) -> tuple[Job, str]:
    options = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "3", "--role", "trainer")
    job = launch(SCRIPT, *options, env={"TORCHELASTIC_HEALTH_CHECK_PORT": "0"})
    found = wait_for("a port is told", lambda: re.search(r"answered at (http://\S+)", job.stderr))
    wait_for(f"the second generation:\n{job.story}", lambda: job.stdout.count("up 1") == 2)
    return job, str(found[1])


def get(url: str, accept: str) -> tuple[str, str | None]:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=30) as answer:
        return answer.read().decode(), answer.headers["Content-Security-Policy"]


@pytest.mark.usefixtures("_browser")
def test_a_browser_sees_the_job_and_a_program_the_list_of_pages(job: tuple[Job, str], tmp_path: Path) -> None:
    url = job[1]
    assert get(url, "text/html,*/*") == (PAGE, POLICY)
    assert "GET  /status" in get(url, "*/*")[0]

    dom = dom_of(url, tmp_path, "--virtual-time-budget=5000")
    words = re.sub(r"<script>.*?</script>|<[^>]+>", " ", dom, flags=re.DOTALL)
    assert (
        "HEALTHY" in words
        and re.search(r"world size\s+2\b", words)
        and re.search(r"restarts charged\s+1 of 3\b", words)
    )
    assert re.search(r"\b1\s+1\s+\d+\s+running\b", words), "a row for each worker"
    assert "rank 1: ValueError: &lt;img" in words, "the failure is text"
    assert "<title>HEALTHY: " in dom and "owned" not in re.search(r"<title>.*?</title>", dom)[0]  # type: ignore[index]


def test_the_page_fetches_from_its_own_server_only_and_asks_for_nothing_else() -> None:
    assert not re.search(r"(?:https?:)?//[a-z]", PAGE) and "method" not in PAGE
    assert "default-src 'none'" in POLICY and "connect-src 'self'" in POLICY
