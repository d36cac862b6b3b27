"""Takes pictures of pages, with chromium."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def find_browser() -> str:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("FAILED: chromium is not on PATH")
    return browser


def draw_timeline(folder: Path) -> Path:
    """The page that `aelastic.timeline` draws of the event logs in a folder."""
    subprocess.run([sys.executable, "-m", "aelastic.timeline", str(folder)], check=True, cwd=ROOT)
    return folder / "timeline.html"


def take_picture(page: Path, picture: Path, size: tuple[int, int], profile: Path, *, scale: int = 1) -> None:
    """Writes a PNG of a page.

    Args:
        page: an HTML file.
        picture: where to write.
        size: of the window, in CSS pixels.
        profile: a folder for the browser's own files.
        scale: pixels of the picture for each CSS pixel.

    Raises:
        subprocess.CalledProcessError: the browser failed.
    """
    command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={profile / 'chromium'}", "--window-size={},{}".format(*size)]
    command += [f"--force-device-scale-factor={scale}", f"--screenshot={picture}", page.as_uri()]
    # On stderr it only complains about what a machine without a screen lacks.
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=60)
    print(f"{picture} has {picture.stat().st_size / 1024:.0f} KiB")
