"""The timeline's page, its style sheet and its script: `page.html`, `page.css` and `page.js`, beside this file."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from string import Template

_HERE = Path(__file__).parent
PAGE = Template((_HERE / "page.html").read_text(encoding="utf-8"))
STYLE = (_HERE / "page.css").read_text(encoding="utf-8")
SCRIPT = (_HERE / "page.js").read_text(encoding="utf-8")
# The only script that the page lets run, whatever a log has brought into it.
SCRIPT_HASH = "sha256-" + base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
