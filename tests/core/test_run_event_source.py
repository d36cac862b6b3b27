"""Run events: stories as text (`stories/run_events/`), and a consistent sequence whatever happens."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest
from kit.effort import examples
from kit.stories.files import stories_in
from kit.stories.group_events import FOLDER, Playing

from aelastic.agent.run_event_source import introduction
from aelastic.base.machine import InvalidTransition
from aelastic.observe import run_events as ev
from aelastic.spec import WorkerSpec


def test_the_story_of_each_phase_has_them_all_and_they_add_up_to_the_run() -> None:
    story = stories_in(FOLDER)[0]
    run = Playing(story.rules)
    list(run.lines(story))
    assert {took.name for took in run.run_events if isinstance(took, ev.PhaseTook)} == set(ev.PHASES)
    assert sum(run.durations.values()) == run.done_at - run.began_at == run.now - 100


def some_line(random: Random, story: Playing) -> str:
    """A current or an earlier event; many are impossible in this phase."""
    if random.random() < 0.02:
        return random.choice(("verdict succeeded", "verdict failed", "stop"))
    of, rank = max(1, story.core.generation - random.choice((0, 0, 0, 1))), random.randrange(2)
    restarts, how = random.randrange(3), random.choice(("", "failed"))
    return random.choice(
        (
            "start", "start ahead", f"round {story.core.generation + 1} restarts={restarts}", f"spawned of={of}",
            f"interrupted {of} restarts={restarts} for=joined", f"{rank} exits {how} ago=0 of={of}", f"{rank} clears of={of}",
            f"{rank} hangs of={of}", "a timer fires",
        )
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(examples(240)))
def test_whatever_happens_the_story_makes_sense(seed: int) -> None:
    random, story = Random(seed), Playing("init")
    while not story.core.is_done:
        line = some_line(random, story)
        if "clears" in line and int(line[0]) in story.core.exits.alive:
            continue  # follows its `Exited`
        story.now += random.randrange(3)
        with suppress(InvalidTransition):  # then nothing has changed
            story.handle(line)
    restarts = [event for event in story.run_events if isinstance(event, ev.Restarting)]
    rounds = [event for event in story.run_events if isinstance(event, ev.RoundFormed)]
    changes = [event for event in story.run_events if isinstance(event, ev.Changed)]
    ended = [(each.generation, each.local_rank) for each in story.run_events if isinstance(each, ev.WorkerEnded)]
    assert len(ended) == len(set(ended))
    assert len(restarts) <= len(rounds) <= len(restarts) + 1
    assert [after.before for after in changes[1:]] == [before.phase for before in changes[:-1]]
    assert all(change.reason for change in changes)
    assert sum(story.durations.values()) == story.done_at - story.began_at


@pytest.mark.parametrize(
    "command, name",
    [
        (("/usr/bin/python3", "-u", "train.py", "--epochs", "3"), "train.py"),
        (("python", "-u", "-m", "package.train", "-v"), "package.train"),
        (("python", "-c", "print()"), "python"),
        (("./train", "python"), "./train"),
    ],
)
def test_an_interpreter_is_introduced_with_the_script_it_runs(command: tuple[str, ...], name: str) -> None:
    spec = WorkerSpec(entrypoint=command[0], args=command[1:])
    assert introduction(spec, run_id="job", node_id="node", host="host", pid=1).entrypoint == name
