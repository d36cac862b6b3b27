"""The page of a running agent, requested like a browser and like a program, and opened in headless Chromium."""

from __future__ import annotations

import html
import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from kit.launching import Job, Launcher
from kit.servers.browser import dom_of
from kit.waiting import wait_for

from aelastic.observe.health.page import PAGE, POLICY

SCRIPT = """
say("up", restart)
if (rank, restart) == (1, 0):
    raise ValueError("<img src=x onerror=\\"document.title='owned'\\">")
time.sleep(600)
"""


def get(url: str, accept: str) -> tuple[str, str | None]:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=30) as answer:
        return answer.read().decode(), answer.headers["Content-Security-Policy"]


def served(launch: Launcher, script: str, *options: str) -> tuple[Job, str]:
    """A job, and the URL of its page."""
    job = launch(script, "--standalone", *options, env={"TORCHELASTIC_HEALTH_CHECK_PORT": "0"})
    return job, str(wait_for("a port is told", lambda: re.search(r"answered at (http://\S+)", job.stderr))[1])


def test_a_browser_gets_the_page_and_a_program_the_list_of_pages(launch: Launcher) -> None:
    _, url = served(launch, "rest()")
    assert get(url, "text/html,*/*") == (PAGE, POLICY)
    assert "GET  /status" in get(url, "*/*")[0]


@pytest.mark.all
@pytest.mark.ci
def test_the_page_shows_the_job_and_its_workers_and_a_failure_as_text(launch: Launcher, tmp_path: Path) -> None:
    job, url = served(launch, SCRIPT, "--nproc-per-node", "2", "--max-restarts", "3", "--role", "trainer")
    wait_for(f"the second generation:\n{job.story}", lambda: job.stdout.count("up 1") == 2)
    dom = dom_of(url, tmp_path, "--virtual-time-budget=5000")
    words = re.sub(r"<script>.*?</script>|<[^>]+>", " ", dom, flags=re.DOTALL)
    assert (
        "HEALTHY" in words
        and re.search(r"world size\s+2\b", words)
        and re.search(r"restarts charged\s+1 of 3\s", words)
    )
    assert re.search(r"\b1\s+1\s+\d+\s+running\b", words), "a row for each worker"
    assert "rank 1: ValueError: &lt;img" in words, "the failure is text"
    assert "<title>HEALTHY: " in dom and "owned" not in re.search(r"<title>.*?</title>", dom)[0]  # type: ignore[index]


# Replaces the server by an agent's answer, and shows what is then on the page.
ANSWERED = """<script>window.fetch = async () => ({ json: async () => (%s) });</script>"""
# As wide as a phone: a window of headless Chromium cannot be that narrow.
PHONE = """<iframe width="390" height="800" srcdoc="%s"></iframe><pre id="probe"></pre><script>setTimeout(() => {
  const page = document.querySelector('iframe').contentDocument, read = (id) => page.getElementById(id).textContent;
  const table = page.querySelector('.scroll');
  document.getElementById('probe').textContent = JSON.stringify({ facts: read('facts'), restart: read('restart'),
    hidden: table.scrollWidth - table.clientWidth, width: page.documentElement.clientWidth });
}, 500);</script>"""
WORKER = {"rank": 1023, "local_rank": 7, "id": 4711000, "state": "running", "cpu_s": 12345.6, "rss_bytes": 98765 << 20}
STATUS: dict[str, Any] = {
    "time": "2026-11-23T20:25:14Z", "since": "2026-11-23T20:25:11Z", "state": "HEALTHY", "phase": "running",
    "run": {"run_id": "job", "entrypoint": "train.py", "host": "n0", "pid": 1, "max_restarts": 2},
    "round": {"round": 3, "world_size": 8, "group_world_size": 1, "restart_count": 2}, "workers": [WORKER],
    "last_restart": {"cause": "failure", "reason": "rank 1 failed on n0; restart 2 of 2", "at": "2026-11-23T20:25:11Z"},
    "last_failure": {"rank": 1, "message": "ValueError: batch 7 is empty\nmore", "traceback": ""},
}  # fmt: skip


def read_on_a_phone(status: dict[str, Any], folder: Path) -> dict[str, Any]:
    page = PAGE.replace("<script>", ANSWERED % json.dumps(status) + "<script>")
    (folder / "phone.html").write_text(PHONE % html.escape(page))
    dom = dom_of((folder / "phone.html").as_uri(), folder, "--virtual-time-budget=2000")
    read = html.unescape(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)[1])  # type: ignore[index]
    return dict(json.loads(read))


@pytest.mark.all
def test_a_phone_shows_all_of_a_worker_why_it_was_restarted_and_that_no_restart_is_left(tmp_path: Path) -> None:
    read = read_on_a_phone(STATUS, tmp_path)
    assert read["width"] < 400
    assert read["hidden"] == 0
    assert "restarts charged2 of 2, none left" in read["facts"]
    assert read["restart"].endswith("rank 1 failed on n0; restart 2 of 2: ValueError: batch 7 is empty")


@pytest.mark.all
@pytest.mark.parametrize("second, is_of_this_restart", [(12, True), (10, False)])
def test_the_page_shows_what_was_kept_in_place(tmp_path: Path, second: int, is_of_this_restart: bool) -> None:
    recovery = {"text": "3 of 4 workers kept, state of step 7 from rank 0, 60 ms", "at": f"2026-11-23T20:25:{second}Z"}
    status = {**STATUS, "last_restart": {**STATUS["last_restart"], "in_place": True}, "last_recovery": recovery}
    restart = read_on_a_phone(status, tmp_path)["restart"]
    assert restart.endswith(f"in place: {recovery['text']}") is is_of_this_restart, restart


def test_the_policy_of_the_page_lets_its_icon_be_shown() -> None:
    assert '<link rel="icon" href="data:,">' in PAGE and "img-src data:;" in POLICY


def test_the_page_fetches_from_its_own_server_only_and_asks_for_nothing_else() -> None:
    assert not re.search(r"(?:https?:)?//[a-z]", PAGE) and "method" not in PAGE
    assert "default-src 'none'" in POLICY and "connect-src 'self'" in POLICY
