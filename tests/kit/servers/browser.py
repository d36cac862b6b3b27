"""Pages as rendered by headless Chromium."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from kit.servers.programs import missing

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# It usually takes two seconds, but the machine may be busy.
TIMEOUT_S = 100.0


def dom_of(url: str, folder: Path, *options: str) -> str:
    """The page at an address after its script has run; skips the test without Chromium.

    Args:
        folder: for the browser's profile.
    """
    if BROWSER is None:
        missing("there is no Chromium here", "BROWSER")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", *options]
    command += ["--window-size=1280,1000", f"--user-data-dir={folder / 'profile'}", "--dump-dom", url]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as browser:
        try:
            return browser.communicate(timeout=TIMEOUT_S)[0]
        finally:
            try:
                os.killpg(browser.pid, signal.SIGKILL)  # its helpers, if it did not end by itself
            except ProcessLookupError:
                pass
