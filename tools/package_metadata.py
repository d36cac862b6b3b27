"""What a package index shows of the project: hatchling asks for it when it builds a package.

A package index has the README's text alone, so links to other files of the repository lead nowhere there.  They become
the names of these files, which are in the source distribution; links within the page and to the web stay.  The
project's addresses are below `PROJECT_URL`, which the release workflow sets: other workflows build the package, too.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!#|[a-z]+:)([^)\s]+)\)")
_PICTURE = re.compile(r'<picture>.*?<img alt="([^"]*)" src="([^"]*)">.*?</picture>', re.DOTALL)
_NOTE = "Files named here are part of the source distribution.\n\n"
_FIRST_TITLE = "\n## "


def for_index(readme: str) -> str:
    """The text without links to files."""
    text = _PICTURE.sub(r"(\1: `\2`)", LINK.sub(named, readme))
    before, title, rest = text.partition(_FIRST_TITLE)
    return f"{before}\n{_NOTE.rstrip()}\n{title}{rest}"


def named(link: re.Match[str]) -> str:
    is_picture, text, target = link.groups()
    path = target.partition("#")[0]
    if is_picture:
        return f"({text}: `{path}`)"
    return f"`{path}`" if text == path else f"{text} (`{path}`)"


def addresses(env: Mapping[str, str]) -> dict[str, str]:
    """Where the project is to be found, by label; nothing where it is built by hand."""
    home = env.get("PROJECT_URL")
    if not home:
        return {}
    return {
        "Homepage": home,
        "Documentation": f"{home}/tree/main/docs",
        "Issues": f"{home}/issues",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
    }


def _update(self: Any, metadata: dict[str, Any]) -> None:
    text = Path(self.root, "README.md").read_text(encoding="utf-8")
    metadata["readme"] = {"content-type": "text/markdown", "text": for_index(text)}
    if urls := addresses(os.environ):  # noqa: TID251  in a build, by the build system
        metadata["urls"] = urls


if find_spec("hatchling") is not None:  # in a build
    from hatchling.metadata.plugin.interface import MetadataHookInterface

    # hatchling takes the class of its interface that it finds here (`[tool.hatch.metadata.hooks.custom]`).
    PackageHook = type("PackageHook", (MetadataHookInterface,), {"update": _update})
