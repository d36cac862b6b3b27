"""Makes docs/lost-node.png and, for narrow screens, docs/lost-node-narrow.png: a job loses a node and continues.

Part of `make pictures`; needs chromium.

Three agents with two workers each run `examples/demo/train_digits.py` on this machine, until one of them is killed.
The chart is the one that `aelastic timeline` draws, without what stands around it on its page.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from pathlib import Path

from demo_elastic import NODES, Story, show_line

from pictures.browser import DOCS, draw_timeline, find_browser, take_picture
from pictures.nodes import TIME_LIMIT_S, NamedNodes

EPOCHS, KILL_AFTER_EPOCH = 30, 12
SIZES = {"lost-node.png": (880, 392), "lost-node-narrow.png": (380, 376)}  # of the window, in CSS pixels
CHART_ALONE = """<style>
  body { padding: 8px 10px; } .frame { border: 0; padding: 0; margin-top: 8px; } #chart { min-width: 0; }
  rect.guess { opacity: 1; } text.in.guess { fill: #10151a; }  /* it is known here when the node was killed */
  .spent, .tools, .card, .notes, h2, .list { display: none; }
</style></head>"""


def main() -> int:
    find_browser()
    with tempfile.TemporaryDirectory(prefix="aelastic-lost-node-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        nodes = NamedNodes(folder, epochs=EPOCHS)
        try:
            follow(nodes)
        finally:
            nodes.stop()
        page = draw_timeline(folder)
        page.write_text(page.read_text().replace("</head>", CHART_ALONE, 1))
        for name, size in SIZES.items():
            take_picture(page, DOCS / name, size, folder, scale=2)
    return 0


def follow(nodes: NamedNodes) -> None:
    """Starts the nodes, and kills the second one in the middle of the training."""
    story, is_killed = Story(), False
    for number in range(NODES[1]):
        nodes.start(f"node-{number + 1}")
    for name, line in nodes.lines(time.monotonic() + TIME_LIMIT_S):
        show_line(name, line)
        story.read(line)
        if story.epochs_done >= KILL_AFTER_EPOCH and not is_killed:
            nodes.signal("node-2", signal.SIGKILL)
            is_killed = True


if __name__ == "__main__":
    sys.exit(main())
