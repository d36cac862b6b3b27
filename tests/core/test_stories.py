"""The stories of the cores (`stories/`): each event has the effects that their files show."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.stories import every, group
from kit.stories.files import FOLDER, SHELL_FOLDER, Story, changes, read, rewritten


@pytest.mark.parametrize("path", every.CORE, ids=lambda path: path.stem)
def test_the_stories_of_a_file_go_as_written(path: Path) -> None:
    assert changes(path, every.CORE[path]) == "", "if the change is intended: `make stories`"


def test_every_story_file_is_read() -> None:
    there = {*FOLDER.rglob("*.txt"), *SHELL_FOLDER.rglob("*.txt")}
    assert there == every.CORE.keys() | every.SHELL.keys()
    assert all(next(read(path), None) for path in there)


def test_what_has_changed_is_shown_and_rewritten(tmp_path: Path) -> None:
    text = (group.FOLDER / "stops.txt").read_text()
    wrong = text.replace("stops 0 1 of generation 1 with SIGINT\n", "stops 0\n", 1)
    path = tmp_path / "stops.txt"
    path.write_text(wrong)

    assert wrong != text
    removed, added = (line for line in changes(path, group.played).splitlines()[2:] if line[0] in "-+")
    assert removed.endswith("; stops 0") and added.endswith("; stops 0 1 of generation 1 with SIGINT")
    path.write_text(rewritten(path, group.played))
    assert path.read_text() == text
    assert changes(path, group.played) == ""


def test_an_event_that_a_core_refuses_says_in_which_story(tmp_path: Path) -> None:
    path = tmp_path / "refused.txt"
    path.write_text("A head.\n\n== a group is started twice\njoining\nstart\n")

    def played(story: Story) -> list[str]:
        return group.played(story)

    with pytest.raises(Exception, match="in phase joining") as caught:
        changes(path, played)
    assert caught.value.__notes__ == ["in the story 'refused: a group is started twice'"]
