"""The English of pages and help: phrases that mark a sentence as translated, and sentences that are too long.

The count includes phrases that are fine in their context, so the limit leaves room for a few.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from sources import ROOT

PHRASES_MAX = 61  # in everything that users read; it used to be 612
CODE_PHRASES_MAX = 41  # in docstrings, comments and messages of assertions
DEVELOPMENT_PHRASES_MAX = 4  # in decisions and the pages about development; it used to be 140
WORDS_MAX = 35  # per sentence
READ = [
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CONTRIBUTING.md")),
    *(page for page in ROOT.glob("docs/**/*.md") if not {"adr", "development"} & {*page.relative_to(ROOT).parts}),
    *ROOT.glob("aelastic/cli/**/*.py"),
]
# Each with a suggestion.
PHRASES = {
    r"\bin (?:the|its|their) place(?: of)?\b": "instead of; replaces it",
    r"(?<!there )\b(?:is|are|was|were) no (?!longer)[a-z]": "is not a …",
    r", too\b": "also; as well",
    r"\b(?:says?|said) (?:so|what|which|how|why|where|whether|who|when|it)\b": "prints, reports, names, tells you",
    r"\b(?:is|are|was|were|be) (?:told|said)\b": "is notified; is logged; reports",
    r"\b(?:hears?|heard)\b": "receives; is notified; learns",
    r"\bso (?:much|many|long)\b": "this much; that long; at most N",
    r"\b(?:go|goes|going|went) on\b": "continue, resume, keep running",
    r"\b(?:is|are) to (?:be|have|go|stop|start|come|leave|do|take)\b": "must; will; should",
    r"\bcounts? (?:as|for)\b": "is treated as; is ignored",
    r"\banew\b|\bfor ever\b|\ball the same\b|\bmend(?:s|ed|ing)?\b": "again; forever; anyway; fix",
    r"\b[Ww]hoever\b|[:;,] who has\b": "anyone who; agents without",
    r"(?:^|[.:;|(] ?)Of (?:each|all|what|a|the|several|these|those|two|many|such)\b|\b[Ww]ithout,": "put the subject first",
    r"(?:^|[.;|] )What [a-z' ]+ (?:is|was|has|goes|stays|stands|comes|had|did|does)\b": "name the thing",
    r"\bhas (?:a|an|the|it|all|each) [a-z ]{0,20}(?:have|leave|save|start|be|become)\b|\bHas it\b": "makes or lets X verb",
    r"\basked for\b": "requested; on request",
    r"\bthere (?:is|are) none\b|\bthat there (?:is|are)\b": "if any; without one",
    r"\bas [a-z' `]+ (?:has|have) it\b": "as in X; following X",
    r"\bby (?:what|that)\b": "from; using; because of",
    r"\b(?:stands|stand) (?:in|at|above|below|for|first|beside|between|there|on)\b": "is; appears",
}
WITH_DOCSTRING = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
CODE = re.compile(r"^ *```.*?^ *```", re.MULTILINE | re.DOTALL)
MARKUP = re.compile(r"\]\([^)]*\)|<[^>]+>")  # links' targets, HTML
PARTS = re.compile(r"\n\s*\n|\n(?=\s*[-*] |\s*\d+\. |#|\|)|\|")  # paragraphs, items of lists, cells of tables
ENDS = re.compile(r"(?<=[.!?:;])\s+")


def found(path: Path, lines: Iterable[tuple[int, str]]) -> Iterator[str]:
    for number, line in lines:
        for pattern, instead in PHRASES.items():
            for match in re.finditer(pattern, line):
                yield f"{path.relative_to(ROOT)}:{number}: “{match[0].strip()}” (write: {instead})"


def prose_of(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of prose in a module: its comments, docstrings and messages of assertions."""
    text = path.read_text()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)
            yield from enumerate(str(docstring.value.value).splitlines(), docstring.lineno)
        elif isinstance(node, ast.Assert) and node.msg is not None:
            constants = [each for each in ast.walk(node.msg) if isinstance(each, ast.Constant)]
            yield from ((each.lineno, each.value) for each in constants if isinstance(each.value, str))


def test_few_phrases_of_the_decisions_and_the_development_pages_sound_translated() -> None:
    pages = [*ROOT.glob("docs/adr/*.md"), *ROOT.glob("docs/development/*.md")]
    matches = [each for path in pages for each in found(path, enumerate(path.read_text().splitlines(), 1))]
    assert len(pages) > 40 and len(matches) <= DEVELOPMENT_PHRASES_MAX, "\n".join([*matches, f"{len(matches)} in all"])


def test_few_phrases_sound_translated() -> None:
    matches = [each for path in READ for each in found(path, enumerate(path.read_text().splitlines(), 1))]
    assert len(READ) > 50 and len(matches) <= PHRASES_MAX, "\n".join([*matches, f"{len(matches)} in all"])


def test_few_phrases_in_the_code_sound_translated() -> None:
    modules = [path for folder in ("aelastic", "tests") for path in sorted(ROOT.glob(f"{folder}/**/*.py"))]
    matches = [each for path in modules for each in found(path, prose_of(path))]
    assert len(modules) > 500 and len(matches) <= CODE_PHRASES_MAX, "\n".join([*matches, f"{len(matches)} in all"])


@pytest.mark.parametrize("page", [path for path in READ if path.suffix == ".md"], ids=lambda path: path.stem)
def test_no_sentence_is_long(page: Path) -> None:
    prose = MARKUP.sub("]", CODE.sub("\n\n", page.read_text()))
    sentences = [sentence for part in PARTS.split(prose) for sentence in ENDS.split(" ".join(part.split()))]
    assert [sentence for sentence in sentences if len(sentence.split()) > WORDS_MAX] == []
