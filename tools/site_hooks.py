"""What mkdocs calls while it builds the site: folders in `nav`, pages of the root, links that leave the documentation.

The site has no address of the repository's files, so a link to one becomes its name, as on a package index.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from package_metadata import LINK, named

ROOT = Path(__file__).parents[1]
OF_THE_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_config(config: Any) -> Any:
    config["nav"] = with_folders(config["nav"])
    return config


def with_folders(nav: list[Any]) -> list[Any]:
    """The navigation with the pages of a folder in its place, by name, but for those that `nav` names itself."""
    listed = {page for entry in nav for pages in (entry.values() if isinstance(entry, dict) else ()) for page in pages}

    def expanded(entry: Any) -> list[Any]:
        match entry:
            case dict():
                return [{title: [page for each in pages for page in expanded(each)] for title, pages in entry.items()}]
            case str() if entry.endswith("/"):
                pages = sorted(f"{entry}{path.name}" for path in (ROOT / "docs" / entry).glob("*.md"))
                return [page for page in pages if page not in listed]
            case _:
                return [entry]

    return [each for entry in nav for each in expanded(entry)]


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name in OF_THE_ROOT:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return within_the_site(markdown, page.file.src_uri)


def on_nav(nav: Any, config: Any, **_: Any) -> None:
    config["sections"] = [item for item in nav.items if item.is_section]


def on_post_build(config: Any) -> None:
    """Writes `llms.txt`: each page with its address and its first paragraph, for readers that are programs."""
    lines = [f"# {config['site_name']}", f"> {config['site_description']}"]
    for section in config["sections"]:
        lines += [f"## {section.title}", *(_listed(page) for page in section.children if page.is_page)]
    Path(config["site_dir"], "llms.txt").write_text("\n\n".join(lines) + "\n")


def _listed(page: Any) -> str:
    first = next((text for text in page.markdown.split("\n\n")[1:] if text[:1].isalnum() or text[:1] in "`["), "")
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    return f"- [{page.title}]({page.url}): {words.partition('. ')[0].rstrip(':.')}"


def within_the_site(text: str, page: str) -> str:
    """A page's text with links between pages as they are on the site; what is not on it is named."""
    folder = os.path.dirname(page if page in OF_THE_ROOT else f"docs/{page}")

    def link(found: Any) -> str:
        path, sign, anchor = found[3].partition("#")
        target = os.path.normpath(os.path.join(folder, path))
        if target.startswith("docs/") and not (ROOT / target).is_dir():
            target = target.removeprefix("docs/")
        elif target not in OF_THE_ROOT:
            return named(found)
        return f"{found[1]}[{found[2]}]({os.path.relpath(target, os.path.dirname(page) or '.')}{sign}{anchor})"

    return LINK.sub(link, text)
