"""Stories of one core as text: events, actions, and the parts of the state that changed.

As in `coordinator.py`, with these differences.  The first line is where the story begins, with options.  A line may hold
several events; below it come all their actions, and after `->` each part of the state that they changed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from kit.stories.files import Story


class Playing:
    """A story in progress."""

    core: Any
    now: float

    def lines(self, story: Story) -> Iterator[str]:
        for full in story.lines:
            line, before = full.partition(" -> ")[0], self.state
            if line.startswith("#"):
                yield line
            elif not line.startswith("  "):
                done = [self.words(action) for each in line.split("; ") for action in self.answer(each)]
                news = [new for new, old in zip(self.state, before, strict=True) if new != old]
                yield line + f" -> {', '.join(words for words, _ in news)}" * bool(news)
                counted = [(what, len(list(same))) for what, same in groupby(done)]
                if counted:
                    yield "  " + "; ".join(what + f", {count} times" * (count > 1) for what, count in counted)

    @property
    def state(self) -> list[tuple[str, Any]]:
        """Each part in words, with a value that distinguishes it from others that read the same."""
        due = self.core.deadline
        left = "nothing is due" if due is None else f"due in {due - self.now:g} s"
        return [*((part, None) for part in self.parts()), (left, due)]

    def parts(self) -> Iterator[str]:
        raise NotImplementedError

    def words(self, action: Any) -> str:
        raise NotImplementedError

    def handle(self, line: str) -> list[Any]:
        """Handles an event, or a line of a special form."""
        raise NotImplementedError

    def pass_deadline(self) -> list[Any]:
        assert self.core.deadline is not None, "nothing is due"
        self.now = max(self.now, self.core.deadline)
        return self.handle("a timer fires")

    def answer(self, line: str) -> list[Any]:
        if slept := re.fullmatch(r"([\d.]+) s are slept", line):
            self.now += float(slept[1])
            return []
        return self.pass_deadline() if line == "the deadline passes" else self.handle(line)
