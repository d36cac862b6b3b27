"""Story files: events, and below each its results, which a run of the stories can rewrite.

A file has a head, then stories.  Each begins with `== ` and its title; the next line is where it begins.  Each kind of
story has a function `played` that takes a story and returns its lines with the present results.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from kit.numbered import restored

FOLDER = Path(__file__).parents[2] / "core" / "stories"
SHELL_FOLDER = Path(__file__).parents[2] / "shell" / "stories"


@dataclass(frozen=True)
class Story:
    path: Path
    title: str
    rules: str
    lines: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.path.stem}: {self.title}"


Player: TypeAlias = Callable[[Story], list[str]]


def read(path: Path) -> Iterator[Story]:
    for part in path.read_text().split("\n== ")[1:]:
        title, rules, *lines = part.rstrip("\n").split("\n")
        yield Story(path, title, rules, tuple(lines))


def stories_in(folder: Path) -> list[Story]:
    return [story for path in sorted(folder.glob("*.txt")) for story in read(path)]


def options_of(line: str) -> dict[str, str]:
    """The options in a line: each word, with the value after its `=`."""
    return dict(word.partition("=")[::2] for word in line.split())


def rewritten(path: Path, player: Player) -> str:
    """The file with the present results."""
    head = path.read_text().split("\n== ")[0]
    parts = ["\n".join([story.title, story.rules, *_lines(story, player)]) for story in read(path)]
    return "\n\n== ".join([head.rstrip("\n"), *parts]) + "\n"


def _lines(story: Story, player: Player) -> list[str]:
    try:
        return [restored(line) for line in player(story)]
    except Exception as error:
        error.add_note(f"in the story {str(story)!r}")
        raise


def changes(path: Path, player: Player) -> str:
    """A diff between the file and the present results; empty if they agree."""
    before, after = path.read_text().splitlines(), rewritten(path, player).splitlines()
    return "\n".join(difflib.unified_diff(before, after, path.name, "as it goes now", lineterm="", n=5))
