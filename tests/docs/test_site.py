"""The documentation site: it is built without the network, a dead link fails the build, and its pages fetch nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import site_hooks
from sources import ROOT

pytest.importorskip("mkdocs")
FETCHED = re.compile(
    r'<(?:script|img|iframe)\b[^>]*\bsrc="(?:https?:)?//|<link\b[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//'
)


def build(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder / "site"), *options]
    env = {
        **os.environ,
        "NO_MKDOCS_2_WARNING": "1",
        "https_proxy": "http://127.0.0.1:9",
        "http_proxy": "http://127.0.0.1:9",
    }
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)


def test_the_site_is_built_with_all_links_alive_and_no_page_fetches_anything(tmp_path: Path) -> None:
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    pages = sorted((tmp_path / "site").glob("**/*.html"))
    assert len(pages) >= len([*ROOT.glob("docs/**/*.md")])
    assert [page for page in pages if FETCHED.search(page.read_text())] == []
    tables = (tmp_path / "site/reference/cli.html").read_text()
    assert "--nproc-per-node" in tables and "<td>" in tables
    listed = re.findall(r"^- \[.+\]\((.+)\): \S", (tmp_path / "site/llms.txt").read_text(), re.MULTILINE)
    assert len(listed) > 40 and all((tmp_path / "site" / address).exists() for address in listed)


def test_a_dead_link_or_anchor_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# One\n\n[there](#one) [no page](two.md) [no anchor](index.md#three)\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    config = re.sub("docs_dir: docs|hooks: .*", "", config)
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path, "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert "'two.md'" in done.stderr and "'index.md#three'" in done.stderr


def test_a_link_that_leaves_the_documentation_becomes_a_name() -> None:
    text = "[it](../SECURITY.md#x) [core](../../aelastic/spec.py) [page](../index.md) [all](../adr/) [web](https://x.y/z.md)"
    assert site_hooks.within_the_site(text.replace("../S", "../../S"), "how-to/caches.md") == (
        "[it](../SECURITY.md#x) core (`../../aelastic/spec.py`) [page](../index.md) all (`../adr/`) [web](https://x.y/z.md)"
    )
    assert site_hooks.within_the_site("[a](docs/how-to/caches.md)", "CHANGELOG.md") == "[a](how-to/caches.md)"


def test_a_folder_in_the_navigation_stands_for_its_pages_that_are_not_named() -> None:
    nav = site_hooks.with_folders([{"How-to": ["how-to/index.md", "how-to/hangs.md", "how-to/"]}])
    (pages,) = (entry["How-to"] for entry in nav)
    assert pages[:2] == ["how-to/index.md", "how-to/hangs.md"] and len(pages) == len(set(pages))
    assert set(pages) == {f"how-to/{page.name}" for page in (ROOT / "docs/how-to").glob("*.md")}
