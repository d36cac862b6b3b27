"""No code reads a sentence: with every decision's text replaced by a number, the stories stay the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit import decided
from kit.numbered import numbered, restored
from kit.stories import every
from kit.stories.files import changes

from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.cause import Cause

pytestmark = pytest.mark.words  # replaces the texts itself


@pytest.mark.parametrize("path", every.CORE, ids=lambda path: path.stem)
def test_the_stories_go_as_written_whatever_the_sentences_are(path: Path) -> None:
    with numbered():
        assert changes(path, every.CORE[path]) == ""


def test_a_sentence_is_a_number_until_it_is_restored() -> None:
    decision = decided.restart(1, 3, decided.failed(2, "n1"))
    text = wording.text_of(decision)
    with numbered():
        number = wording.text_of(decision)
        assert re.fullmatch(r"#\d+", number) and restored(f"W {number}, node0#1") == f"W {text}, node0#1"
        assert wording.text_of(decision) == number != wording.text_of(decided.refused())
    assert wording.text_of(decision) == restored(text) == text == "rank 2 failed on n1; restart 1 of 3"


def test_what_is_found_out_by_searching_a_sentence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def is_failure(cause: Cause) -> bool:
        return re.match(r"rank \d+ failed on ", wording.text_of(cause)) is not None

    monkeypatch.setattr(Cause, "is_failure", property(is_failure))
    found = [path.stem for path in every.CORE if changes(path, every.CORE[path])]
    with numbered():
        noticed = {path.stem for path in every.CORE if changes_or_error(path)}
    assert found == [], "for now the text contains it"
    assert {"coordinator", "policy", "takeover", "run_events"} <= noticed


def changes_or_error(path: Path) -> str:
    try:
        return changes(path, every.CORE[path])
    except Exception as error:  # noqa: BLE001  a core may reject the effects of a wrong answer
        return str(error)
