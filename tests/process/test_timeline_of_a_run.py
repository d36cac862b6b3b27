"""`python -m aelastic.timeline` as a program, and on the log of a real run."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from kit.stories.event_logs import NodeLog, a_crash
from kit.stories.timelines import boxes_of, data_of

from aelastic.timeline.command import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Logs of two nodes, as two machines leave them on a file system that they share."""
    for node in a_crash():
        node.write(tmp_path / "logs" / node.host / "job_1a2b")
        (tmp_path / "logs" / node.host / "latest").symlink_to("job_1a2b")
    return tmp_path / "logs"


def test_it_runs_as_a_module_and_imports_neither_torch_nor_asyncio(folder: Path) -> None:
    code = f"import sys; from aelastic.timeline.command import main; main([{str(folder)!r}]); "
    code += "print({'torch', 'asyncio', 'anyio', 'aiohttp'} & set(sys.modules))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert seen.stdout.endswith("set()\n")

    command = [sys.executable, "-m", "aelastic.timeline", "--help"]
    help_ = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert help_.stdout.startswith("usage: python -m aelastic.timeline LOGDIR")


def test_a_log_whose_agent_is_gone_is_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    NodeLog(socket.gethostname(), pid=gone.pid).write(tmp_path / "a")
    # The process with this pid is another one: it began long after the log.
    NodeLog(socket.gethostname(), pid=os.getpid()).write(tmp_path / "b")

    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.count(": cut off; ") == 2


def test_a_real_run_that_crashes_once_has_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nif os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and os.environ['RANK'] == '1':\n"
        "    raise RuntimeError('loss is NaN')\n"
    )
    command = [sys.executable, "-m", "aelastic", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--log-dir", str(tmp_path / "logs"), str(script)]
    subprocess.run(command, capture_output=True, check=True, timeout=60)

    assert main([str(tmp_path / "logs")]) == 0

    assert "1 restart (" in capsys.readouterr().out
    page = (tmp_path / "logs" / "timeline.html").read_text()
    assert "RuntimeError: loss is NaN" in page
    assert all(boxes_of(data_of(page), "life", outcome) for outcome in ("failed", "succeeded"))
