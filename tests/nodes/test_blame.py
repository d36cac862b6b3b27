"""Hosts that are blamed: a host whose worker is ended by a segmentation fault twice has no seat, and the others go on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit.faults import netns
from kit.launching import LAUNCH_TIMEOUT_S, wait_for
from kit.ports import quiet_port
from kit.verbs import told, verb

SCRIPT = """
import os, signal, time
host = os.uname().nodename
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
open("starts", "a").write(f"{restart} {host} {os.environ['WORLD_SIZE']}\\n")
while not os.path.exists("end"):
    if host == "n2" and restart in "01" and len(open("starts").readlines()) % 3 == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(0.01)
"""


@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "")
def test_a_host_that_breaks_twice_has_no_seat_and_a_person_gives_it_back(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    options = ["--nnodes=2:3", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{quiet_port()}", "--max-restarts=9"]
    agents = []
    for host in ("n1", "n2", "n3"):
        (tmp_path / host).mkdir()
        script = f'hostname {host}; exec "$0" -m aelastic "$@" train.py'
        command = ["unshare", "--uts", "sh", "-c", script, sys.executable, *options]
        env = {
            "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
            "XDG_RUNTIME_DIR": f"{tmp_path}/{host}",
            "TMPDIR": str(tmp_path),
        }
        with (tmp_path / f"{host}.log").open("w") as log:
            files: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            agents.append(subprocess.Popen(command, cwd=tmp_path, env=env, **files))

    def said(host: str) -> str:
        return (tmp_path / f"{host}.log").read_text()

    try:
        wait_for("n2 is excluded", lambda: "this node is excluded for 168 h" in said("n2"), limit_s=LAUNCH_TIMEOUT_S)
        wait_for("the others go on", lambda: "2 n1 2\n" in (tmp_path / "starts").read_text())
        blamed = "restart 2 of 9; again n2 is the cause: it has no seat while there are enough nodes"
        for host in ("n1", "n2", "n3"):
            assert blamed in said(host), said(host)
            last, first = told(tmp_path / host, "why", "-n", "2")["why"]
            assert last["failure"]["host"] == first["failure"]["host"] == "n2", "each node knows"
            assert "n2 is blamed: twice within a day" in verb(tmp_path / host, "why").out
        assert verb(tmp_path / "n1", "include", "n2").code == 0
        wait_for("n2 is back", lambda: "2 n2 3\n" in (tmp_path / "starts").read_text())
        # A person takes the seat away again.
        assert verb(tmp_path / "n1", "exclude", "n7").code == 1
        excluded = verb(tmp_path / "n1", "exclude", "n2", "--reason", "its fans")
        assert excluded.code == 0 and excluded.out.startswith("n2 is excluded for "), excluded
        wait_for("n2 waits outside", lambda: said("n2").count("this node is excluded for ") == 2)
        wait_for("the others go on", lambda: (tmp_path / "starts").read_text().count("2 n1 2\n") == 2)
        (tmp_path / "end").touch()
        assert [agent.wait(LAUNCH_TIMEOUT_S) for agent in agents] == [0, 0, 0], said("n1")
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
