"""`aelastic doctor`: one line for each check, an exit code, and nothing started."""

from __future__ import annotations

import http.server
import re
import resource
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
from kit.launching import WARM_STORE
from kit.ports import quiet_port
from kit.programs import run_python
from kit.screens import Screen
from kit.waiting import wait_for
from kit.warm.interpreters import Warm

from aelastic.cli.doctor import host_checks
from aelastic.cli.doctor.command import write_finding
from aelastic.cli.doctor.endpoint_checks import check_endpoints
from aelastic.cli.doctor.finding import Finding
from aelastic.diagnose.stacks.memory import Unreadable
from aelastic.errors import EXIT_FAILURE, EXIT_INPUT
from aelastic.rdzv.protocol.keys import Key
from aelastic.rdzv.settings import RendezvousSettings

# Soon gives up on a program that does not answer a TCPStore client.
IMPATIENT = """
from aelastic.cli.doctor import endpoint_checks

endpoint_checks.ANSWER_TIMEOUT_S = 0.5
"""


def doctor(folder: Path, *argv: str, before: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs `aelastic doctor`.

    Args:
        before: Python code that runs before the command line.
    """
    code = f"{before}\nfrom aelastic.cli.main import main_and_exit\nmain_and_exit()\n"
    return run_python("-c", code, "doctor", *argv, folder=folder, **{"TMPDIR": str(folder), **variables})


def lines_of(run: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """Level and text of each line, by subject."""
    split = [line.split(None, 1) for line in run.stdout.splitlines()]
    return {rest.partition(": ")[0]: f"{level} {rest.partition(': ')[2]}" for level, rest in split}


def test_each_endpoint_has_a_line_that_shows_what_is_there(tmp_path: Path, warm_store: Warm) -> None:
    port = quiet_port()
    with http.server.ThreadingHTTPServer(("127.0.0.2", port), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        # The first is free, the second another program, and the third has a name that never resolves (RFC 2606).
        names = [f"127.0.0.1:{port}", f"127.0.0.2:{port}", "no-such-host.invalid:1"]
        options = ["--nnodes", "3", "--rdzv-backend", "c10d", "--log-dir", "logs", "no-such-script.py"]
        before = IMPATIENT + WARM_STORE.format(python=warm_store.python)
        run = doctor(tmp_path, *options, before=before, PET_RDZV_ENDPOINT=",".join(names))
        server.shutdown()
    lines = lines_of(run)
    assert run.returncode == EXIT_FAILURE, run.stderr
    assert (
        lines[f"endpoint {names[0]}"]
        == "ok 127.0.0.1, this host; the port is free: the agent of this host will serve it"
    )
    assert lines[f"endpoint {names[1]}"].startswith("error 127.0.0.2, this host; 127.0.0.2:")
    assert lines[f"endpoint {names[2]}"].startswith("error cannot resolve the host")
    assert lines[f"endpoint {names[2]}"].endswith("; the endpoint is from PET_RDZV_ENDPOINT")
    assert lines["endpoints"] == "ok 3 of them: the job survives the loss of 1"
    assert lines["log folder"] == "ok logs can be written to"
    assert lines["torch"].startswith("ok ")
    assert lines["stacks"] == "ok stacks of workers can be read"
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_a_finding_is_wrapped_between_words_below_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(rows=60, columns=40)
    monkeypatch.setenv("COLUMNS", "40")
    words = "cannot resolve the host (try getent hosts no-such-host.invalid there)"
    with open(screen.theirs, "w", closefd=False) as stdout, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", stdout)
        write_finding(Finding("error", "endpoint no-such-host.invalid:1", words))
    wait_for("the last line", lambda: any("there)" in row for row in screen.rows))
    seen = "\n".join(screen.rows)
    wrapped = r"^error    endpoint\n {9}no-such-host\.invalid:1: cannot\n {9}resolve the host"
    assert re.search(wrapped, seen, re.MULTILINE), seen


def test_options_that_cannot_work_are_refused(tmp_path: Path) -> None:
    run = doctor(tmp_path, "--nnodes", "2", "--rdzv-backend", "c10d")
    assert (run.returncode, run.stdout) == (EXIT_INPUT, "")
    assert run.stderr.startswith("aelastic: error: ") and run.stderr.count("\n") == 1


def test_what_a_host_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_pid: int) -> NoReturn:
        raise Unreadable("cannot read its memory (Operation not permitted)")

    (tmp_path / "a-file").touch()
    assert host_checks.check_log_folder(tmp_path / "a-file").level == "error"
    assert host_checks.check_log_folder(tmp_path / "some" / "logs").level == "ok"
    assert host_checks.check_shared_memory(str(tmp_path / "missing")).level == "warning"
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY:
        assert "ulimit -n" in host_checks.check_open_files(max_nodes=soft).words
    with monkeypatch.context() as patched:
        patched.setattr(host_checks, "stacks_of", refuse)
        found = host_checks.check_stacks()
    assert (found.level, found.words.partition(";")[0]) == (
        "warning", "the stacks of hanging workers cannot be read: cannot read its memory (Operation not permitted)",
    )  # fmt: skip
    assert host_checks.check_torch({"PYTHONHOME": str(tmp_path)}).level == "error"


async def found(**fields: Any) -> dict[str, str]:
    """Findings for a job of two nodes whose endpoint is on this host, where other hosts cannot reach it."""
    where = f"127.0.0.1:{quiet_port()}"
    settings = RendezvousSettings("c10d", where, 2, 2, **fields)
    lines = {each.subject: f"{each.level} {each.words}" async for each in check_endpoints(settings, "job", {})}
    assert lines.pop(f"endpoint {where}").startswith("warning 127.0.0.1, this host; the port is free")
    return lines


async def test_who_can_get_in_is_reported_with_the_key_that_is_used(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("the first secret, of 32 bytes or more\nthe second secret, of 32 bytes or more\n")
    first, second = (Key(line.encode(), "job").id[:4] for line in secret.read_text().splitlines())
    lines = await found(local_addr="192.0.2.77", secret_file=str(secret))
    assert lines["secret"] == f"ok key {first} of {secret} is used, {second} is also accepted"
    assert lines["listening"].startswith("ok the agent listens at 192.0.2.77 and loopback")
    firewall = "warning needed: the workers' store, gloo and NCCL accept anyone who reaches 192.0.2.77"
    assert lines["firewall"].startswith(firewall)
    assert "leader" not in lines, "no job is running"
    lines = await found(bind_all=True)
    assert lines["secret"].startswith("warning none: anyone who reaches an agent's port can join or end the job")
    assert lines["listening"].startswith("ok the agent and the workers' store listen at all addresses")
    assert (await found(local_addr="127.0.0.1"))["firewall"].startswith("ok not needed")
