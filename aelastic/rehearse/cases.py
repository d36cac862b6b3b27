"""The faults that a script is rehearsed with, and what is held against it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

from aelastic.errors import EXIT_TRY_AGAIN
from aelastic.rehearse.files import changed_in, put_away, stamps_of
from aelastic.rehearse.play import NOTICE_S, Play, Script

# Steps that are watched after a fault, and the time that they may take beside what they took undisturbed.
AFTER, SLACK_S = 5, 60.0
FROZEN_S = 3.0
SAME = 1e-6  # relative; "to six digits"
RESUME = "load the newest checkpoint when the script begins, and count steps from it"
WHOLE = "write a checkpoint under another name, then os.replace it: what is half written is never found"
STATE = "save and load all of the state: optimizer, schedule, random numbers, the place in the data"
NOTICE = "call notice.due() in each step on every rank, save when it is True, then call notice.saved()"
WORLD = "take the world size from the environment, and cut the data by it, also when a checkpoint is loaded"


class Found(NamedTuple):
    """What one rehearsal has shown."""

    name: str
    holds: bool
    text: str
    advice: str = ""


# Whether it holds, what was seen, and what to change.
Judged: TypeAlias = tuple[bool, str, str]


class Undisturbed(NamedTuple):
    """How a run goes that nothing disturbs."""

    first: int
    last: int
    step_s: float
    start_s: float  # until the first step
    saves: tuple[int, ...]  # steps after which files had changed
    metrics: dict[int, float]

    def until(self, step: int) -> float:
        """Seconds that a run may take until a step."""
        return 3 * (self.start_s + (step - self.first + 1) * self.step_s) + SLACK_S


class CannotError(Exception):
    """The undisturbed run is none to compare with; says why."""


class Rehearsals:
    """All of one script.

    Args:
        script: what is run.
        for_s: of the undisturbed run, at most.
    """

    def __init__(self, script: Script, for_s: float) -> None:
        self._script, self._for_s = script, for_s
        self._before = stamps_of(script.root, script.apart)
        self._number, self._holds = 0, True  # after a kill between two saves
        self.undisturbed = Undisturbed(0, 0, 0.0, 0.0, (), {})

    def first(self) -> Found:
        """Runs it undisturbed.

        Raises:
            CannotError: it fails, or shows no progress.
        """
        with self._play() as play:
            code = play.wait_end(self._for_s)
            play.end()
            if code:
                raise CannotError(f"undisturbed, it fails: {play.cause}")
            if play.last < 0:
                raise CannotError(
                    f"undisturbed, it shows no step that matches {self._script.step.pattern!r} (--progress)"
                )
            begins = play.steps[0]
            took_s = max(play.steps[-1].at - begins.at, 0.001)
            self.undisturbed = Undisturbed(
                begins.number, play.last, took_s / max(1, play.last - begins.number), begins.at - play.began,
                tuple(play.saved_after), play.metrics.get(1, {}),
            )  # fmt: skip
        self._clear()
        steps = play.last - begins.number + 1
        return Found(
            "undisturbed", True, f"{steps} steps in {took_s:.3g} s{'' if code == 0 else ', as far as it came'}"
        )

    @property
    def cases(self) -> dict[str, Callable[[], Judged]]:
        """By the words for them."""
        at, last = self._at, self._script.workers - 1
        cases: dict[str, Callable[[], Judged]] = {
            f"rank {last} killed at step {at}": partial(self._killed, last),
            "killed again within a step": self._killed_twice,
            "killed while it saves": self._killed_writing,
            f"notice, {NOTICE_S} s, at step {at}": self._noticed,
            "notice before the first step": self._noticed_early,
            f"one worker more ({last + 2})": partial(self._other_size, last + 2),
            f"a rank frozen for {FROZEN_S:g} s": self._frozen,
        }
        if last:
            cases[f"one worker fewer ({last})"] = partial(self._other_size, last)
        return cases

    @property
    def _at(self) -> int:
        """The step of a fault: just after a save, so that it is well before the next."""
        first, last, saves = self.undisturbed.first, self.undisturbed.last, self.undisturbed.saves
        middle = first + (last - first) // 3
        after = next((step for step in saves if step >= middle), middle)
        return min(after + 1, max(first, last - 1))

    def run(self, name: str) -> Found:
        """One of `cases`."""
        try:
            holds, text, advice = self.cases[name]()
        finally:
            self._clear()
        return Found(name, holds, text, advice)

    def _play(self, *more: str) -> Play:
        self._number += 1
        return Play(self._script, self._script.apart / f"{self._number:02}", *more)

    def _clear(self) -> None:
        script = self._script
        put_away(self._before, script.root, script.apart, script.apart / f"{self._number:02}" / "files")

    # The cases.

    def _killed(self, rank: int) -> Judged:
        with self._play() as play:
            if not self._reach(play, self._at):
                return self._astray(play)
            play.kill(rank)
            self._holds, text, advice = self._judge(play, to_end=True)
            return self._holds, text, advice

    def _killed_twice(self) -> Judged:
        with self._play() as play:
            if not self._reach(play, self._at):
                return self._astray(play)
            play.kill(0)
            if play.wait(lambda: play.generation == 2, self.undisturbed.until(self._at)):
                play.kill(0)
            return self._judge(play, generation=3)

    def _killed_writing(self) -> Judged:
        if not self.undisturbed.saves:
            return True, "it saves nothing that is seen here (--checkpoints DIR)", ""
        with self._play() as play:
            self._reach(play, self.undisturbed.first)
            usual = set().union(*play.opened().values())
            # The second save: there is an older checkpoint to go back to.
            self._reach(play, (*self.undisturbed.saves[1:2], self.undisturbed.saves[0])[0] - 1)
            caught = play.catch_writer(usual, self.undisturbed.until(self.undisturbed.last))
            if not caught:
                return True, "no save took long enough to be caught", ""
            holds, text, advice = self._judge(play)
            names = ", ".join(sorted(path.name for path in caught)[:2])
            return (
                holds,
                f"{text} ({names} was half written)",
                WHOLE if not holds and (self._holds or not advice) else advice,
            )

    def _noticed(self) -> Judged:
        with self._play() as play:
            if not self._reach(play, self._at):
                return self._astray(play)
            asks, saved = play.asks, self._leaves(play)
        if saved is None:
            return self._has_stayed(play)
        with self._play() as again:
            holds, text, advice = self._judge(again, generation=1, before=play)
        lost = play.last + 1 - (again.steps[0].number if again.steps else 0)
        if asks and (lost > 0 or not saved):
            what = "" if saved else f"not all ranks had saved within {NOTICE_S} s; "
            return False, f"{what}{text}", NOTICE
        return holds, f"{'saved' if asks else 'no rank has asked for notices'}; {text}", advice

    def _noticed_early(self) -> Judged:
        with self._play() as play:
            play.wait(lambda: bool(play.pids()), SLACK_S)
            if self._leaves(play) is None:
                return self._has_stayed(play)
        with self._play() as again:
            return self._judge(again, generation=1, before=play)

    def _leaves(self, play: Play) -> bool | None:
        """A notice: whether all ranks have saved before the node had to go; `None`: it did not go."""
        began = time.monotonic()
        play.notice()
        code = play.wait_end(NOTICE_S + SLACK_S)
        play.end()
        return time.monotonic() - began < NOTICE_S - 2.0 if code == EXIT_TRY_AGAIN else None

    def _has_stayed(self, play: Play) -> Judged:
        if play.agent.returncode == 0:
            return True, f"it came to its end within {NOTICE_S} s", ""
        return False, f"it did not end within {NOTICE_S} s: {play.cause}", NOTICE

    def _other_size(self, workers: int) -> Judged:
        with self._play() as play:
            if not self._reach(play, self._at):
                return self._astray(play)
            play.end()
        with self._play("--nproc-per-node", str(workers)) as again:
            holds, text, advice = self._judge(again, generation=1, before=play, same_size=False)
        return holds, text, advice if holds or advice == RESUME else WORLD

    def _frozen(self) -> Judged:
        with self._play() as play:
            if not self._reach(play, self._at):
                return self._astray(play)
            rank = min(each.rank for each in play.steps)
            play.signal(rank, signal.SIGSTOP)
            play.wait(lambda: False, FROZEN_S)
            last = min(play.last_of(rank) + AFTER, self.undisturbed.last)
            play.signal(rank, signal.SIGCONT)
            if not play.wait(lambda: play.last_of(rank) >= last, self.undisturbed.until(last)) or play.generation > 1:
                return False, f"it did not go on: {play.cause}", "limits that a pause of seconds breaks are too short"
            return True, "it went on", ""

    # What they have in common.

    def _reach(self, play: Play, step: int) -> bool:
        return play.wait(lambda: play.last >= step, self.undisturbed.until(step)) and not self._is_astray(play)

    def _is_astray(self, play: Play) -> bool:
        return play.steps[0].number != self.undisturbed.first

    def _astray(self, play: Play) -> Judged:
        if play.steps and self._is_astray(play):
            return (
                False,
                f"it began at step {play.steps[0].number}",
                "name the folder that it saves to: --checkpoints DIR",
            )
        return False, f"it did not come as far: {play.cause}", ""

    def _judge(
        self,
        play: Play,
        *,
        generation: int = 2,
        before: Play | None = None,
        to_end: bool = False,
        same_size: bool = True,
    ) -> Judged:
        """After a fault: how a run goes on.

        Args:
            play: that goes on.
            generation: of workers that is to do so.
            before: the run that had the fault, if it is another.
            to_end: it is watched until it ends.
            same_size: as many workers as undisturbed.
        """
        usual, old = self.undisturbed, before or play
        reached, stamps, began = old.last, dict(old.stamps), time.monotonic()
        play.wait(lambda: play.generation >= generation, usual.until(max(reached, usual.first)))
        goal = usual.last if to_end else min(max(reached, usual.first) + AFTER, usual.last)
        if before is None:
            reached = max((each.number for each in play.steps if each.generation < generation), default=-1)
        first = play.first_of(generation)
        if first is None:
            return False, f"it did not come back: {play.cause}", ""
        play.wait(lambda: self._newest(play, generation) >= goal, usual.until(goal))
        if to_end:
            play.wait_end(usual.until(goal))
        back = f"back in {max(0.0, first.at - began):.2g} s"
        lost, saved = reached + 1 - first.number, any(step < reached for _, step in old.saves)
        if first.number <= usual.first and saved:
            over = sorted(path.name for path in changed_in(stamps, play.stamps))
            wrote = f"; overwrote {', '.join(over[:2])}" if over else ""
            return False, f"began again at step {first.number}: {lost} lost, though it had saved{wrote}", RESUME
        if lost < 0:
            return False, f"steps {reached + 1} to {first.number - 1} were never made", RESUME
        if (newest := self._newest(play, generation)) < goal:
            return False, f"went on at step {first.number}, and came to {newest} of {goal}: {play.cause}", ""
        how = (
            "began"
            if reached < 0
            else f"resumed at {first.number} ({lost} lost)"
            if saved
            else f"began again ({lost} lost)"
        )
        if same_size and (wrong := self._first_other(play, generation, old)):
            return False, f"{how}; {wrong}", STATE
        numbers = f", numbers to step {newest} the same" if same_size and play.metrics.get(generation) else ""
        return True, f"{how}, {back}{numbers}", ""

    @staticmethod
    def _newest(play: Play, generation: int) -> int:
        return max((each.number for each in play.steps if each.generation >= generation), default=-1)

    def _first_other(self, play: Play, generation: int, old: Play) -> str:
        """Where numbers are others than undisturbed; empty where they are the same, or differ without a fault, too."""
        if any(self._differences(old.metrics.get(1, {}))) and (old is not play or generation > 1):
            return ""
        return next(self._differences(play.metrics.get(generation, {})), "")

    def _differences(self, metrics: dict[int, float]) -> Iterator[str]:
        for step, value in sorted(metrics.items()):
            usual = self.undisturbed.metrics.get(step)
            if usual is not None and not math.isclose(value, usual, rel_tol=SAME):
                yield f"at step {step} the number is {value:g} in the place of {usual:g}"
