"""The page at `/` for browsers: `/status` for people, refreshed every two seconds.

The page is `page.html`, beside this file, in the style of the timeline.  Its script queries only this server, changes
nothing, and shows the answers as text; the policy lets no other script run.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

PAGE = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
_SCRIPT = PAGE.partition("<script>")[2].partition("</script>")[0]
_HASH = "sha256-" + base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; script-src '{_HASH}'; "
    "frame-ancestors 'none'"
)
