"""Stories of a worker group's run events: the events of `kit.stories.group`, and the run events that follow."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from aelastic.agent.run_event_source import RunEventSource
from aelastic.base.record import Record
from aelastic.errors import ProcessFailure
from aelastic.observe import run_events as ev
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.decision import Decision
from aelastic.workers.states import Phase
from kit.stories import files, group
from kit.stories.files import Story

FOLDER = files.FOLDER / "run_events"


class Playing(group.Playing):
    """A group, its run events, and the clock."""

    def __init__(self, where: str) -> None:
        super().__init__("init")
        self.source, self.run_events = RunEventSource(self.core), list[ev.RunEvent]()
        self.began_at = self.done_at = self.now
        self.begin(where)

    @property
    def state(self) -> list[tuple[str, Any]]:
        return []  # `Changed` reports it

    @property
    def durations(self) -> dict[str, float]:
        """The total duration of each phase."""
        sums: dict[str, float] = defaultdict(float)
        for took in self.run_events:
            if isinstance(took, ev.PhaseTook) and took.name != "detect":
                sums[took.name] += took.duration_s
        return sums

    def handle(self, line: str) -> list[Any]:
        return [run_event for event in self.events(line) for run_event in self.put(event)]

    def put(self, event: Any) -> list[ev.RunEvent]:
        was = self.core.phase
        self.core.handle(event, self.now)
        self.began_at = self.now if was is Phase.INIT else self.began_at
        self.done_at = self.now if was is not Phase.DONE else self.done_at
        news = self.source.handle(event, self.now)
        self.run_events += news
        return news

    def words(self, action: Any) -> str:
        match action:
            case ev.Changed(before, phase, state, reason):
                return f"{before} -> {phase}, {state.value}: {reason}"
            case ev.PhaseTook(name, duration_s, local_rank):
                return f"{name} took {duration_s:g} s" + ("" if local_rank is None else f" of {local_rank}")
            case _:
                return f"{type(action).__name__}({', '.join(word(getattr(action, name)) for name in action.__match_args__)})"


def word(value: Any) -> str:
    if isinstance(value, ProcessFailure):
        return value.message
    if isinstance(value, Decision):
        return wording.text_of(value)
    is_workers = isinstance(value, tuple) and any(isinstance(each, Record) for each in value)
    return f"{len(value)} workers" if is_workers else str(value)


def played(story: Story) -> list[str]:
    return list(Playing(story.rules).lines(story))
