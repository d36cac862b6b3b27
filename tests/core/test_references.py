"""The pages refer to things that exist: linked files, and the package's modules and names."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path, PurePath

import pytest
from package_metadata import for_index
from sources import ROOT, source

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob(".github/**/*.md")])
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(?:#([\w-]+))?\)")
# `logs/lines.py`, `procs.py:LocalWorkers.wait`, `aelastic/errors.py`, `tests/core`, `make test`
MODULE = re.compile(r"`((?:[\w.]+/)*[\w]+\.py)(?::(\w+)(?:\.(\w+))?)?`")
FOLDER = re.compile(r"`((?:aelastic|tests|docs|benchmarks|examples|tools|\.github)/[\w/-]*)`")
VERB = re.compile(r"`make ([a-z][a-z-]*)")
SCRIPTS = {"train.py", "worker.py", "program.py", "aelastic/rdzv/stores/file.py"}  # the user's, and an example


def each(pattern: re.Pattern[str]) -> list[tuple[str, tuple[str, ...]]]:
    found = [
        (page.relative_to(ROOT).as_posix(), tuple(part or "" for part in match.groups()))
        for page in PAGES
        for match in pattern.finditer(page.read_text())
    ]
    return sorted(set(found))


def is_there(page: str, path: str) -> bool:
    places = (ROOT, ROOT / "aelastic", ROOT / "aelastic/rdzv", ROOT / page / "..")
    return path in SCRIPTS or any((place / path).exists() for place in places)


def anchors(page: Path) -> set[str]:
    text = page.read_text()
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    former = re.findall(r'^<a id="(.*)"></a>$', text, re.MULTILINE)  # anchors of renamed headings
    return {*former} | {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_link_leads_somewhere() -> None:
    dead = [
        (page, path, anchor)
        for page, (path, anchor) in each(LINK)
        if not (target := (ROOT / page).parent / path).exists()
        or (anchor and target.suffix == ".md" and anchor not in anchors(target))
    ]
    assert dead == []


def test_every_module_and_folder_that_a_page_names_is_there() -> None:
    named = [(page, path) for page, (path, *_) in each(MODULE)] + [(page, path) for page, (path,) in each(FOLDER)]
    assert [(page, path) for page, path in named if not is_there(page, path)] == []


@pytest.mark.parametrize("page, name", [(page, parts) for page, parts in each(MODULE) if parts[1]])
def test_every_name_that_a_page_gives_a_module_is_in_it(page: str, name: tuple[str, ...]) -> None:
    path, first, second = name
    module = source("aelastic." + path.removeprefix("aelastic/").removesuffix(".py").replace("/", "."))
    made = module.definition(first)
    assert made is not None, page
    if second:
        assert isinstance(made, ast.ClassDef) and second in {getattr(each, "name", "") for each in made.body}, page


def test_every_make_verb_that_a_page_names_is_there() -> None:
    verbs = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert [(page, verb) for page, (verb,) in each(VERB) if verb not in verbs] == []


def test_on_a_package_index_no_link_leads_nowhere_and_the_files_named_are_in_the_source_distribution() -> None:
    text = for_index((ROOT / "README.md").read_text())
    assert not re.findall(r"\]\((?!#|https?:)", text)
    assert {f"#{anchor}" for anchor in anchors(ROOT / "README.md")} >= set(re.findall(r"\]\((#[^)]*)\)", text))
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"][
        "include"
    ]
    named = set(re.findall(r"`((?:docs|examples|benchmarks)/[^`]*[^`/]|[A-Z]+\.md)`", text))
    assert len(named) > 20
    for path in sorted(named):
        assert (ROOT / path).exists() and any(
            PurePath(f"/{path}").match(each) or path.startswith(f"{each[1:]}/") for each in included
        ), path
