"""torchrun and aelastic print what docs/how-to/torchrun-errors.md quotes."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from kit.ports import quiet_port
from sources import ROOT

PAGE = ROOT / "docs" / "how-to" / "torchrun-errors.md"
LIMIT_S = 100.0
LAUNCHERS = {
    "torchrun": [str(Path(sys.executable).with_name("torchrun"))],
    "aelastic": [sys.executable, "-m", "aelastic"],
}
ALONE = ["--standalone", "--nproc-per-node", "2"]
TWO_NODES = [
    "--nnodes",
    "2",
    "--rdzv-backend",
    "c10d",
    "--rdzv-id",
    "errors",
    "--rdzv-conf",
    "join_timeout=5,read_timeout=5",
]
FAILS = 'import os, time\nif os.environ["RANK"] == "1":\n    raise KeyError("lr")\ntime.sleep(60)\n'
GROUP = """import datetime, os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
"""
# The other rank reports its error even if a launcher has sent SIGTERM before.
DIES = f"""{GROUP}signal.signal(signal.SIGTERM, signal.SIG_IGN)
dist.barrier()
if dist.get_rank() == 1:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    dist.all_reduce(torch.ones(1))
"""
WAITS = """import datetime, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=6))
if dist.get_rank() == 1:
    time.sleep(60)
dist.all_reduce(torch.ones(1))
"""
PARSES = "import argparse\nargparse.ArgumentParser().parse_args()\n"


def quotes(page: str) -> dict[str, dict[str, str]]:
    """By heading, the quoted message of each launcher."""
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    return {
        each.partition("\n")[0]: dict(re.findall(r"^> (torchrun|aelastic): `([^`]+)`", each, re.MULTILINE))
        for each in sections
    }


QUOTES = quotes(PAGE.read_text())


def at(endpoint: str) -> list[str]:
    return [*TWO_NODES, "--rdzv-endpoint", endpoint]


# By heading: the script, the options, the script's arguments.  Some tests occupy a port.
CASES: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "ChildFailedError without a cause": (FAILS, ALONE, ()),
    "SIGTERM or SIGKILL as the root cause": (DIES, ALONE, ()),
    "Connection closed or reset by peer": (DIES, ALONE, ()),
    "A collective times out": (WAITS, ALONE, ()),
    "Address already in use": ("", ["--nproc-per-node", "1", "--master-port", "{taken}"], ()),
    "The host name of the endpoint is not found": ("", at("no-such-host:{free}"), ()),
    "The connection to the C10d store has failed": ("", at("192.0.2.1:{free}"), ()),
    "RendezvousTimeoutError": ("", at("127.0.0.1:{free}"), ()),
    "unrecognized arguments: --local-rank": (PARSES, ALONE, ("--local-rank", "0")),
}


def test_each_section_quotes_both_launchers_and_is_tried() -> None:
    assert {*CASES} == {*QUOTES} and all({*each} == {"torchrun", "aelastic"} for each in QUOTES.values())


@pytest.mark.all
@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("heading", CASES)
def test_a_launcher_prints_what_the_page_quotes(heading: str, launcher: str, tmp_path: Path) -> None:
    text, options, arguments = CASES[heading]
    script = tmp_path / ("hang.py" if text == WAITS else "fail.py")
    script.write_text(text)
    with socket.create_server(("0.0.0.0", 0)) as taken:
        ports = {"taken": taken.getsockname()[1], "free": quiet_port()}
        command = [*LAUNCHERS[launcher], *(option.format(**ports) for option in options), script.name, *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    quoted = re.escape(QUOTES[heading][launcher]).replace("…", ".*")
    assert done.returncode and re.search(quoted, done.stdout + done.stderr), done.stderr[-3000:]
