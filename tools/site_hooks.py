"""What mkdocs calls while it builds the site: folders in `nav`, pages of the root, links that leave the documentation.

The site has no address of the repository's files, so those that its pages name are on it (`site_files.py`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import site_files
from package_metadata import LINK

ROOT = Path(__file__).parents[1]
OF_THE_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
FENCED = re.compile(r"(^ *(`{3,}).*?^ *\2$)", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?<![\[`])`((?:deploy|examples|benchmarks/results)/[^`\s]+)`(?![\]`])")
OPTION = re.compile(r"(?<![\w-])--?[a-z][\w-]*")
# How a page ranks in the search: guides first, then the reference, and the reasons and the changes last.
BOOSTS = {"how-to/": 3.0, "tutorials/": 2.0, "adr/": 0.2, "development/": 0.2, "CHANGELOG": 0.1}


def on_config(config: Any) -> Any:
    config["nav"] = with_folders(config["nav"])
    return config


def with_folders(nav: list[Any]) -> list[Any]:
    """The navigation with the pages of a folder in its place, by name, but for those that `nav` names itself."""
    listed = set(_named(nav))

    def expanded(entry: Any) -> list[Any]:
        match entry:
            case dict():
                return [
                    {title: within if isinstance(within, str) else _flat(within)} for title, within in entry.items()
                ]
            case str() if entry.endswith("/"):
                pages = sorted(f"{entry}{path.name}" for path in (ROOT / "docs" / entry).glob("*.md"))
                return [page for page in pages if page not in listed]
            case _:
                return [entry]

    def _flat(entries: list[Any]) -> list[Any]:
        return [each for entry in entries for each in expanded(entry)]

    return _flat(nav)


def _named(entry: Any) -> Iterator[str]:
    match entry:
        case str():
            yield entry
        case dict():
            yield from _named(list(entry.values()))
        case list():
            for each in entry:
                yield from _named(each)


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    for name in OF_THE_ROOT:
        files.append(File.generated(config, name, content=(ROOT / name).read_text()))
    for each in site_files.shown():
        files.append(File.generated(config, each.address, content=each.text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    address = page.file.src_uri
    boost = next((boost for start, boost in BOOSTS.items() if address.startswith(start)), None)
    if boost:
        page.meta["search"] = {"boost": boost}
    if address not in OF_THE_ROOT and not (ROOT / "docs" / address).exists():
        return markdown  # made for the site
    # A page's title is not found behind a comment.
    return within_the_site(re.sub(r"\A<!--.*?-->\s*", "", markdown, flags=re.DOTALL), address)


def on_page_content(html: str, **_: Any) -> str:
    html = re.sub(r"<table>.*?</table>", _readable, html, flags=re.DOTALL)
    html = re.sub(r"<code>(--[\w-]+)</code>", r'<code class="option">\1</code>', html)
    # The line of a command breaks before an option, not behind its hyphens (`site.css`).
    return re.sub(r'(?<=<div class="language-console highlight">).*?(?=</div>)', _with_options, html, flags=re.DOTALL)


def _with_options(block: re.Match[str]) -> str:
    return OPTION.sub(r'<span class="option">\g<0></span>', block[0])


def _readable(table: re.Match[str]) -> str:
    return _with_columns(re.sub(r"<code>[^<]*</code>", _readable_code, table[0]))


def _readable_code(code: re.Match[str]) -> str:
    """Code in a cell: a bar was escaped, for the table; names break behind an underscore, options nowhere."""
    text = code[0].replace("\\|", "|").replace("_", "_<wbr>")
    return text if text.startswith("<code>--") else OPTION.sub(r'<span class="option">\g<0></span>', text)


def _with_columns(table: str) -> str:
    """A table of three columns and more with each cell's column, for narrow screens (`site.css`)."""
    names = [re.sub(r"<[^>]*>|\"", "", name) for name in re.findall(r"<th[^>]*>(.*?)</th>", table, re.DOTALL)]
    if len(names) < 3:
        return table

    def row(found: re.Match[str]) -> str:
        columns = iter(["", *names[1:]])
        return re.sub(r"<td", lambda _: f'<td data-column="{next(columns, "")}"', found[0])

    return re.sub(r"<tr>.*?</tr>", row, table, flags=re.DOTALL).replace("<table>", "<table data-wide>", 1)


def on_nav(nav: Any, config: Any, **_: Any) -> None:
    config["nav_items"] = nav.items


def on_post_build(config: Any) -> None:
    """Writes `llms.txt`: each page with its address and its first paragraph, for readers that are programs."""
    lines = [f"# {config['site_name']}", f"> {config['site_description']}"]
    for item in config["nav_items"]:
        lines += [f"## {item.title}"] if item.is_section else []
        lines += [_listed(page) for page in _pages(item)]
    Path(config["site_dir"], "llms.txt").write_text("\n\n".join(lines) + "\n")


def _pages(item: Any) -> Iterator[Any]:
    if item.is_page:
        yield item
    for each in item.children or ():
        yield from _pages(each)


def _listed(page: Any) -> str:
    first = next((text for text in page.markdown.split("\n\n")[1:] if text[:1].isalnum() or text[:1] in "`["), "")
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", " ".join(first.split()))
    return f"- [{page.title}]({page.url}): {words.partition('. ')[0].rstrip(':.') or page.title}"


def within_the_site(text: str, page: str) -> str:
    """A page's text with links as they are on the site, and with one for each file of the site that it names."""
    folder = os.path.dirname(page if page in OF_THE_ROOT else f"docs/{page}")
    here = os.path.dirname(page) or "."

    def link(found: re.Match[str]) -> str:
        path, sign, anchor = found[3].partition("#")
        target = os.path.normpath(os.path.join(folder, path))
        if target.startswith("docs/") and not (ROOT / target).is_dir():
            target = target.removeprefix("docs/")
        elif target not in OF_THE_ROOT:
            target = site_files.address_of(target) or target
        return f"{found[1]}[{found[2]}]({os.path.relpath(target, here)}{sign}{anchor})"

    def name(found: re.Match[str]) -> str:
        address = site_files.address_of(found[1].rstrip("/"))
        return f"[{found[0]}]({os.path.relpath(address, here)})" if address else found[0]

    parts = FENCED.split(text)[::3], FENCED.findall(text)
    prose = [NAMED.sub(name, LINK.sub(link, part)) for part in parts[0]]
    fenced = [block for block, _ in parts[1]] + [""]
    return "".join(text for pair in zip(prose, fenced, strict=True) for text in pair)
