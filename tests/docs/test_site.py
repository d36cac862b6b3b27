"""The documentation site builds without network access, fails on dead links, and has pages that fetch nothing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest
import site_hooks
from kit.servers.browser import dom_of
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


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.mark.ci
@pytest.mark.all
def test_the_site_is_built_with_all_links_alive_and_no_page_fetches_anything(site: Path) -> None:
    pages = sorted(site.glob("**/*.html"))
    assert len(pages) >= len([*ROOT.glob("docs/**/*.md")])
    texts = {page: page.read_text() for page in pages}
    assert [page for page, text in texts.items() if FETCHED.search(text)] == []
    # No page links to a missing file.
    assert not [
        (page, path) for page, text in texts.items() for path in re.findall(r"<code>((?:\.\./)+[^<]*)</code>", text)
    ]
    listed = re.findall(r"^- \[.+?\]\((.+?)\): \S", (site / "llms.txt").read_text(), re.MULTILINE)
    assert len(listed) > 40
    assert [address for address in listed if not (site / address).exists()] == []
    assert {"how-to/install.html", "how-to/slurm.html"} <= set(listed)


@pytest.mark.ci
@pytest.mark.all
@pytest.mark.parametrize("folder", ["deploy", "examples", "benchmarks/results"])
def test_files_of_the_repository_are_on_the_site_as_they_are_and_to_be_read(site: Path, folder: str) -> None:
    files = [
        path
        for path in (ROOT / folder).glob("**/*.*[a-z]")
        if path.is_file() and path.suffix in {".py", ".sbatch", ".yaml", ".json", ".service", ".sh"}
    ]
    assert files
    contents = (site / folder / "files.html").read_text()
    for path in files:
        name = path.relative_to(ROOT).as_posix()
        assert (site / name).read_text() == path.read_text()
        assert path.name in contents
        if path.suffix != ".json":
            assert f'href="{quote(path.name)}"' in (site / f"{name}.html").read_text()


@pytest.mark.ci
@pytest.mark.all
def test_a_cell_of_a_wide_table_has_the_name_of_its_column_for_a_phone(site: Path) -> None:
    page = (site / "reference/cli.html").read_text()
    assert '<td data-column="default"><code>1:1</code></td>' in page
    assert (
        "<table data-wide>" in page
        and "<table data-wide>" not in (site / "explanation/charging.html").read_text().partition("<table")[0]
    )
    assert "stylesheets/site.css" in page and (site / "stylesheets/site.css").exists()


@pytest.mark.ci
@pytest.mark.all
def test_a_page_has_the_title_of_its_first_heading_and_guides_come_before_decisions(site: Path) -> None:
    assert "<title>Command line - aelastic</title>" in (site / "reference/cli.html").read_text()
    index = json.loads((site / "search/search_index.json").read_text())
    boosts = {each["location"]: each.get("boost", 1) for each in index["docs"]}
    assert boosts["how-to/hangs.html"] > boosts["reference/cli.html"] > boosts["adr/0001-a-guard-process.html"]
    assert not [address for address in boosts if address.startswith(("deploy/slurm", "examples/train"))]


@pytest.mark.all
@pytest.mark.ci
def test_the_search_works_in_pages_that_are_opened_from_a_folder(site: Path, tmp_path: Path) -> None:
    url = f"{(site / 'index.html').as_uri()}?q=hang"
    dom = dom_of(url, tmp_path, "--virtual-time-budget=20000")
    assert re.search(r"\d+ matching documents", dom)
    found = re.findall(r'<a href="([^"?#]*)[^"]*" class="md-search-result__link"', dom)
    assert any(address.endswith("how-to/hangs.html") for address in found[:2]), found[:5]


@pytest.mark.ci
@pytest.mark.all
def test_the_page_for_an_unknown_address_has_a_search_box_that_leads_to_the_search(site: Path) -> None:
    form = re.search(r'<form class="find" action="([^"]+)".*?</form>', (site / "404.html").read_text(), re.DOTALL)
    assert form is not None and '<input type="search" name="q"' in form[0]
    assert (site / form[1].lstrip("/")).exists()


@pytest.mark.ci
@pytest.mark.all
def test_commands_wrap_before_their_options(site: Path) -> None:
    page = (site / "how-to/hangs.html").read_text()
    assert '<div class="language-console highlight">' in page and '<span class="option">--hang-timeout</span>' in page


@pytest.mark.ci
@pytest.mark.all
def test_code_in_a_cell_has_its_bars_and_does_not_break_inside_an_option(site: Path) -> None:
    page = (site / "how-to/speak.html").read_text()
    assert '<code>aelastic why [JOB | LOGS] [<span class="option">-n</span> N]</code>' in page
    assert '[<span class="option">--at-save</span> | <span class="option">--now</span>]' in page
    pages = [path for path in site.glob("**/*.html") if "adr" not in path.parts]
    assert [
        path.name for path in pages if re.search(r"<td[^>]*>(?:(?!</td>).)*<code>[^<]*\\\|", path.read_text())
    ] == []


@pytest.mark.all  # a second build
def test_a_dead_link_or_anchor_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/index.md").write_text("# One\n\n[there](#one) [no page](two.md) [no anchor](index.md#three)\n")
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    config = re.sub("docs_dir: docs|hooks: .*|extra_css: .*|custom_dir: .*", "", config)
    (tmp_path / "mkdocs.yml").write_text(config)
    done = build(tmp_path, "--config-file", str(tmp_path / "mkdocs.yml"))
    assert done.returncode != 0
    assert "'two.md'" in done.stderr and "'index.md#three'" in done.stderr


def test_a_link_that_leaves_the_documentation_leads_to_the_file_on_the_site() -> None:
    text = "[it](../SECURITY.md#x) [core](../../aelastic/spec.py) [page](../index.md) [all](../adr/) [web](https://x.y/z.md)"
    assert site_hooks.within_the_site(text.replace("../S", "../../S"), "how-to/caches.md") == (
        "[it](../SECURITY.md#x) [core](../aelastic/spec.py) [page](../index.md) [all](../adr/index.md) [web](https://x.y/z.md)"
    )
    assert site_hooks.within_the_site("`deploy/slurm/train.sbatch` `a`", "how-to/slurm.md") == (
        "[`deploy/slurm/train.sbatch`](../deploy/slurm/train.sbatch.md) `a`"
    )
    fenced = "```console\n$ cp `deploy/slurm/train.sbatch` [a](../x)\n```\n"
    assert site_hooks.within_the_site(fenced, "how-to/slurm.md") == fenced
    assert site_hooks.within_the_site("[a](docs/how-to/caches.md)", "CHANGELOG.md") == "[a](how-to/caches.md)"


def test_a_folder_in_the_navigation_covers_its_pages_that_are_not_named() -> None:
    nav = site_hooks.with_folders([{"How-to": ["how-to/index.md", "how-to/hangs.md", "how-to/"]}])
    (pages,) = (entry["How-to"] for entry in nav)
    assert pages[:2] == ["how-to/index.md", "how-to/hangs.md"] and len(pages) == len(set(pages))
    grouped = site_hooks.with_folders([{"How-to": [{"Speed": ["how-to/caches.md"]}, "how-to/"]}])
    assert grouped[0]["How-to"][0] == {"Speed": ["how-to/caches.md"]} and "how-to/caches.md" not in grouped[0]["How-to"]
    assert set(pages) == {f"how-to/{page.name}" for page in (ROOT / "docs/how-to").glob("*.md")}
