"""Makes docs/timeline.png: a picture of a real run of `examples/train_digits.py`.

    python examples/timeline_picture.py [FOLDER]        (or `make timeline-picture`; needs chromium)

Three agents with two workers each learn to read digits, all on this machine.  A worker raises an exception, later an
agent is killed with SIGKILL, later yet another joins.  The logs stay in FOLDER, where one is named.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from demo_elastic import MIN_ACCURACY, NODES, WORKERS, Nodes, Story, free_port, show_line, tell

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "timeline.png"
SIZE = (1280, 900)  # pixels: the head of the page, the chart and the first restart
EPOCHS, CRASH_AT_EPOCH, CRASH_RANK = 60, 12, 3
EPOCHS_BETWEEN = 10  # after which the next thing happens
TIME_LIMIT_S = 400.0

# An agent that thinks its machine has another name: all of them are here, and the picture would not tell them apart.
AGENT = """\
import runpy, socket, sys
name = sys.argv.pop(1)
socket.gethostname = lambda: name
runpy.run_module("aelastic", run_name="__main__", alter_sys=True)
"""


class NamedNodes(Nodes):
    """Agents whose hosts have names, and that keep event logs."""

    def __init__(self, folder: Path) -> None:
        script = [str(ROOT / "examples" / "train_digits.py"), "--checkpoint", str(folder / "digits.pt")]
        script += ["--epochs", str(EPOCHS), "--min-accuracy", str(MIN_ACCURACY)]
        self._script = [*script, "--crash-at-epoch", str(CRASH_AT_EPOCH), "--crash-rank", str(CRASH_RANK)]
        self._endpoint, self._folder = f"127.0.0.1:{free_port()}", folder
        super().__init__([], [], str(folder))

    def start(self, name: str) -> None:
        options = ["--nnodes", "{}:{}".format(*NODES), "--nproc-per-node", str(WORKERS), "--max-restarts", "3"]
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", self._endpoint, "--rdzv-id", "digits"]
        options += ["--log-dir", str(self._folder / name)]
        self._command = [sys.executable, "-c", AGENT, name, *options, *self._script]
        super().start(name)


def main() -> int:
    find_browser()
    with tempfile.TemporaryDirectory(prefix="aelastic-timeline-", ignore_cleanup_errors=True) as temporary:
        folder = Path(sys.argv[1] if len(sys.argv) > 1 else temporary).resolve()
        nodes = NamedNodes(folder)
        try:
            follow(nodes)
        finally:
            nodes.stop()
        subprocess.run([sys.executable, "-m", "aelastic.timeline", str(folder)], check=True, cwd=ROOT)
        take_picture(folder / "timeline.html", PICTURE, SIZE, Path(temporary))
    return 0


def find_browser() -> str:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("FAILED: there is no chromium here.")
    return browser


def follow(nodes: NamedNodes) -> None:
    """Starts the nodes; after the crash one of them is killed, and later another one joins."""
    story = Story()
    for number in range(NODES[1]):
        nodes.start(f"node-{number + 1}")
    is_killed = has_joined = False
    for name, line in nodes.lines(time.monotonic() + TIME_LIMIT_S):
        show_line(name, line)
        story.read(line)
        since = story.epochs_done - (story.resumed_after or [story.epochs_done])[-1]
        if since >= EPOCHS_BETWEEN and len(story.resumed_after) == 1 and not is_killed:
            nodes.signal("node-2", signal.SIGKILL)
            is_killed = True
        if since >= EPOCHS_BETWEEN and len(story.resumed_after) == 2 and not has_joined:
            nodes.start("node-4")
            has_joined = True


def take_picture(page: Path, picture: Path, size: tuple[int, int], profile: Path) -> None:
    command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile / 'chromium'}", "--window-size={},{}".format(*size)]
    # It complains of what a machine without a screen lacks.
    subprocess.run(
        [*command, f"--screenshot={picture}", page.as_uri()], check=True, stderr=subprocess.DEVNULL, timeout=60
    )
    tell(f"{picture} has {picture.stat().st_size / 1024:.0f} KiB.")


if __name__ == "__main__":
    sys.exit(main())
