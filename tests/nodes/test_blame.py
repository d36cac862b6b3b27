"""Blamed hosts: a host whose worker dies of a segmentation fault twice is excluded, and the others continue."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.agents import c10d, team_of
from kit.faults import netns
from kit.launching import LAUNCH_TIMEOUT_S, Launcher
from kit.verbs import json_of, verb
from kit.waiting import wait_for

WORKER = """
host, starts, end = os.uname().nodename, f"{os.environ['SHARED']}/starts", f"{os.environ['SHARED']}/end"
open(starts, "a").write(f"{restart} {host} {os.environ['WORLD_SIZE']}\\n")
while not os.path.exists(end):
    if host == "n2" and restart < 2 and len(open(starts).readlines()) % 3 == 0:
        os.kill(os.getpid(), signal.SIGSEGV)
    time.sleep(0.01)
"""


@pytest.mark.all
@pytest.mark.ci
@pytest.mark.skipif(bool(netns.why_not()), reason=netns.why_not() or "")
def test_a_host_that_breaks_twice_has_no_seat_and_a_person_gives_it_back(launch: Launcher, tmp_path: Path) -> None:
    def starts(line: str) -> int:
        return (tmp_path / "starts").read_text().count(f"{line}\n") if (tmp_path / "starts").exists() else 0

    options, env = ("--max-restarts", "9"), {"SHARED": str(tmp_path)}
    with team_of(launch, c10d(), "2:3", worker=WORKER, options=options, env=env) as team:
        hosts = [["unshare", "--uts", "sh", "-c", f'hostname n{number}; exec "$@"', "sh"] for number in (1, 2, 3)]
        n1, n2, n3 = (team.start(prefix=prefix) for prefix in hosts)
        n2.wait_logged("this node is cordoned for 168 h", limit_s=LAUNCH_TIMEOUT_S)
        wait_for("the others go on", lambda: starts("2 n1 2") == 1)
        for agent in (n1, n2, n3):
            assert "restart 2 of 9; n2 is the cause again: cordoned while there are enough other nodes" in agent.stderr
            last, first = json_of(agent.folder, "why", "-n", "2")["why"]
            assert last["failure"]["host"] == first["failure"]["host"] == "n2", "each node knows"
            assert "n2 blamed: after a second time within a day" in verb(agent.folder, "why").out
        assert verb(n1.folder, "uncordon", "n2").code == 0
        wait_for("n2 is back", lambda: starts("2 n2 3") == 1)
        # A user excludes the host again.
        assert verb(n1.folder, "cordon", "n7").code == 1
        cordoned = verb(n1.folder, "cordon", "n2", "--reason", "its fans")
        assert cordoned.code == 0 and ": n2 is cordoned for " in cordoned.out, cordoned
        n2.wait_logged("this node is cordoned for ", 2)
        wait_for("the others go on", lambda: starts("2 n1 2") == 2)
        (tmp_path / "end").touch()
        assert [agent.wait() for agent in (n1, n2, n3)] == [0, 0, 0], team.story
