"""Files of the repository as pages of the site: recipes, examples, results of benchmarks, and what pages link to."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from package_metadata import LINK

ROOT = Path(__file__).parents[1]
FOLDERS = {
    "deploy": "Files to deploy with",
    "examples": "Examples",
    "benchmarks/results": "Results of benchmarks",
    "docs/adr": "Decisions",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".sh": "bash", ".sbatch": "bash", ".service": "ini", "": "docker"}
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"


class Shown(NamedTuple):
    """A file of the site: a page, or what is behind a link."""

    address: str  # below the site's root, as mkdocs has it: pages end in .md
    text: str


@cache
def files() -> dict[str, str]:
    """The address of each file's page, by its path; raw files have their own path."""
    paths = [
        path for folder in FOLDERS for path in (ROOT / folder).glob("**/*") if path.is_file() and path.name[0] != "."
    ]
    found = [
        path.relative_to(ROOT).as_posix() for path in sorted([*paths, *_linked()]) if "__pycache__" not in path.parts
    ]
    return {path: _address(path) for path in found if not path.startswith("docs/")}


def shown() -> Iterator[Shown]:
    """All that the site has besides the documentation's own pages."""
    for path, address in files().items():
        text = (ROOT / path).read_text()
        if address.endswith(".md"):
            yield Shown(address, NOT_SEARCHED + (text if address == path else _page(path, text)))
        if address != path or path.endswith(".json"):
            yield Shown(path, text)
    for folder, title in FOLDERS.items():
        yield Shown(_contents_of(folder), _contents(folder, title))


def address_of(target: str) -> str | None:
    """Where a path of the repository is on the site, but for the documentation's own pages; None if it is not there."""
    return _contents_of(target) if target in FOLDERS else files().get(target)


def _contents_of(folder: str) -> str:
    """The page that lists a folder; the documentation's own is the first page of its section."""
    return f"{folder.removeprefix('docs/')}/index.md" if folder.startswith("docs/") else f"{folder}/files.md"


def _linked() -> Iterator[Path]:
    """Files outside the documentation that its pages link to."""
    for page in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]:
        for _, _, target in LINK.findall(page.read_text()):
            path = Path(page.parent, target.partition("#")[0]).resolve()
            if path.is_file() and path.is_relative_to(ROOT) and path.parent != ROOT:
                yield path


def _address(path: str) -> str:
    return path if path.endswith((".md", ".json")) else f"{path}.md"


def _page(path: str, text: str) -> str:
    name = Path(path).name
    head = f"# {path}\n\n[Download {name}]({name})\n\n"
    if path.endswith(".ipynb"):
        return head + "\n\n".join(_cells(json.loads(text)["cells"])) + "\n"
    return f"{head}````{LANGUAGES.get(Path(path).suffix, '')}\n{text}````\n"


def _cells(cells: Iterable[dict[str, Any]]) -> Iterator[str]:
    for cell in cells:
        text = "".join(cell["source"])
        yield text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"


def _contents(folder: str, title: str) -> str:
    own = folder.startswith("docs/")
    pages = (
        sorted((ROOT / folder).glob("*.md"))
        if own
        else [ROOT / path for path in files() if path.startswith(f"{folder}/")]
    )
    lines = [f"- [{_title(path, folder)}]({_address(path.relative_to(ROOT / folder).as_posix())})" for path in pages]
    return f"# {title}\n\n" + "\n".join(lines) + "\n"


def _title(path: Path, folder: str) -> str:
    found = re.match(r"# (.+)", path.read_text()) if path.suffix == ".md" else None
    return found[1] if found else path.relative_to(ROOT / folder).as_posix()
