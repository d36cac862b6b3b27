"""Makes docs/recovery.png and, for narrow screens, docs/recovery-narrow.png: ranks are lost, the others keep running.

Part of `make pictures`; needs chromium.

Three agents with two workers each run `examples/in_place/train.py` on this machine.  A rank is killed, and later a
node.  The chart is the one that `aelastic timeline` draws; of what stands around it on its page, only the words about
each restart are left.
"""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import time
from os import kill
from pathlib import Path

from demo_elastic import NODES

from pictures.browser import DOCS, ROOT, draw_timeline, find_browser, take_picture
from pictures.nodes import TIME_LIMIT_S, NamedNodes

# The first one is killed once each node's template has imported what the script does, which takes some seconds.
STEPS, SAVE_EVERY, KILL_RANK_AT, KILL_NODE_AT = 4000, 500, 2000, 3000
LOST = 3  # the rank, which is on the second node
SIZES = {"recovery.png": (880, 372), "recovery-narrow.png": (380, 352)}  # of the window, in CSS pixels
CHART_AND_RESTARTS = """<style>
  body { padding: 8px 10px; } .frame { border: 0; padding: 0; margin-top: 8px; } #chart { min-width: 0; }
  rect.guess { opacity: 1; } text.in.guess { fill: #10151a; }  /* it is known here when the node was killed */
  h1, h2, .facts, .spent, .tools, .list, .notes, .start, .mark.recovered { display: none; }
  .card { border: 0; padding: 0; margin: 4px 0 0; } .card p, .scroll, .live .card button { display: none; }
  .card h3, .card p:nth-last-of-type(2) { display: inline; margin: 0 8px 0 0; font-size: 13px; }  /* what was kept */
  .card .took { margin-left: 6px; }
</style></head>"""


def main() -> int:
    find_browser()
    with tempfile.TemporaryDirectory(prefix="aelastic-recovery-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        script = [str(ROOT / "examples" / "in_place" / "train.py"), "--checkpoint", str(folder / "checkpoint.pt")]
        script += ["--steps", str(STEPS), "--save-every", str(SAVE_EVERY)]
        nodes = NamedNodes(folder, script, options=["--preload", "auto"])
        try:
            follow(nodes)
        finally:
            nodes.stop()
        page = draw_timeline(folder)
        page.write_text(page.read_text().replace("</head>", CHART_AND_RESTARTS, 1))
        for name, size in SIZES.items():
            take_picture(page, DOCS / name, size, folder, scale=2)
    return 0


def follow(nodes: NamedNodes) -> None:
    """Starts the nodes; kills a rank of the second one, and later that node."""
    pid = 0
    for number in range(NODES[1]):
        nodes.start(f"node-{number + 1}")
    for name, line in nodes.lines(time.monotonic() + TIME_LIMIT_S):
        print(f"{name} | {line}", flush=True)
        if found := re.search(rf"rank {LOST} is process (\d+)", line):
            pid = int(found[1])
        elif f"step {KILL_RANK_AT}:" in line:
            kill(pid, signal.SIGKILL)
        elif f"step {KILL_NODE_AT}:" in line:
            nodes.signal("node-2", signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
