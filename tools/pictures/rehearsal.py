"""Makes docs/rehearsal.png: what `aelastic rehearse` says of the first script of docs/tutorials/rehearse.md.

make pictures       (needs chromium)
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pictures.browser import DOCS, find_browser, take_picture

PAGE, PICTURE = DOCS / "tutorials" / "rehearse.md", DOCS / "rehearsal.png"
OPTIONS = [
    "--metric",
    r"loss (\S+)",
    "--checkpoints",
    "checkpoints",
    "--nproc-per-node",
    "2",
    "--progress",
    r"step (\d+)",
]
LINE_PX, COLUMN_PX, MARGIN_PX = 21, 8.45, 18
STYLE = f"""
body {{ margin: 0; background: #16181d; color: #d7dae0; font: 14px/{LINE_PX}px "DejaVu Sans Mono", monospace; }}
pre {{ margin: {MARGIN_PX}px; font: inherit; }}
.ok {{ color: #7fc97f; }} .fail {{ color: #ff7b72; font-weight: bold; }} .skip {{ color: #9aa0a6; }}
.command {{ color: #8ab4f8; }}
"""


def main() -> int:
    find_browser()
    block = re.search(r'```python title="train.py"\n(.*?)```', PAGE.read_text(), re.DOTALL)
    assert block is not None
    with tempfile.TemporaryDirectory(prefix="aelastic-rehearsal-") as temporary:
        folder = Path(temporary)
        (folder / "train.py").write_text(block[1])
        command = [sys.executable, "-m", "aelastic", "rehearse", "--output", "rehearsal", *OPTIONS, "train.py"]
        said = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()
        lines = [
            "$ aelastic rehearse --metric 'loss (\\S+)' --nproc-per-node 2 --progress 'step (\\d+)' train.py",
            *said,
        ]
        page = folder / "page.html"
        page.write_text(f'<meta charset="utf-8"><style>{STYLE}</style><pre>{"<br>".join(map(marked, lines))}</pre>')
        width = int(max(map(len, lines)) * COLUMN_PX) + 2 * MARGIN_PX
        take_picture(page, PICTURE, (width, len(lines) * LINE_PX + 2 * MARGIN_PX), folder)
    return 0


def marked(line: str) -> str:
    text = html.escape(line)
    for words, kind in (
        (r"(?<=\s)ok(?=\s)", "ok"),
        (r"\bFAIL\b|\bNO\b", "fail"),
        (r"\bskip\b|not tested", "skip"),
        (r"^\$ .*", "command"),
    ):
        text = re.sub(words, lambda found, kind=kind: f'<span class="{kind}">{found[0]}</span>', text)  # type: ignore[misc]
    return text


if __name__ == "__main__":
    sys.exit(main())
