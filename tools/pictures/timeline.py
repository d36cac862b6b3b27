"""Makes docs/timeline.png: a picture of a real run of `examples/demo/train_digits.py`.

Part of `make pictures`; needs chromium.

Three agents with two workers each learn to read digits, all on this machine.  A worker raises an exception, later an
agent is killed with SIGKILL, later yet another joins.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path

from demo_elastic import MIN_ACCURACY, NODES, Story, show_line

from pictures.browser import DOCS, ROOT, draw_timeline, find_browser, take_picture
from pictures.nodes import TIME_LIMIT_S, NamedNodes

SIZE = (1280, 900)  # pixels: the head of the page, the chart and the first restart
CRASH = ["--crash-at-epoch", "12", "--crash-rank", "3"]
EPOCHS_BETWEEN = 10  # after which the next thing happens


def main() -> int:
    find_browser()
    with tempfile.TemporaryDirectory(prefix="aelastic-timeline-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        script = [str(ROOT / "examples" / "demo" / "train_digits.py"), "--checkpoint", str(folder / "digits.pt")]
        nodes = NamedNodes(folder, [*script, "--epochs", "60", "--min-accuracy", str(MIN_ACCURACY), *CRASH])
        try:
            follow(nodes)
        finally:
            nodes.stop()
        take_picture(draw_timeline(folder), DOCS / "timeline.png", SIZE, folder)
    return 0


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


if __name__ == "__main__":
    sys.exit(main())
