"""Sentences as numbers: the functions that word causes and decisions return `#1`, `#2`, … instead, one per sentence.

A result that does not change with them was not read from a sentence.  Texts are restored before they are compared with
expected ones.  `pytest -p kit.numbered` runs all tests this way, except those marked `words`, which test the sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from aelastic.rdzv.decisions import wording

RENDERERS = "text_of", "settled", "instead_of", "blame"
_NUMBER = re.compile(r"(?<![\w#])#(\d+)\b")
_sentences: list[str] = []


def restored(text: str) -> str:
    """The text with each number replaced by its sentence, which may itself contain numbers."""
    while _sentences and (again := _NUMBER.sub(_sentence, text)) != text:
        text = again
    return text


def _sentence(match: re.Match[str]) -> str:
    number = int(match[1])
    return _sentences[number - 1] if 0 < number <= len(_sentences) else match[0]


def _numbered(render: Callable[..., str]) -> Callable[..., str]:
    def number(*args: Any) -> str:
        sentence = render(*args)
        if not sentence:
            return ""
        if sentence not in _sentences:
            _sentences.append(sentence)
        return f"#{_sentences.index(sentence) + 1}"

    return number


@contextmanager
def numbered() -> Iterator[list[str]]:
    """Replaces the functions; yields the sentences that they would have returned."""
    before = {name: getattr(wording, name) for name in RENDERERS}
    for name, render in before.items():
        setattr(wording, name, _numbered(render))
    try:
        yield _sentences
    finally:
        for name, render in before.items():
            setattr(wording, name, render)
        _sentences.clear()


# As a pytest plug-in.


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    words = [item for item in items if item.get_closest_marker("words")]
    config.hook.pytest_deselected(items=words)
    items[:] = [item for item in items if item not in words]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol() -> Iterator[None]:
    with numbered():
        return (yield)
