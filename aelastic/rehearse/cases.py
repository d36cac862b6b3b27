"""The faults that a script is rehearsed with, and what is held against it."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from aelastic.errors import EXIT_TRY_AGAIN
from aelastic.rehearse.files import changed_in, entries_of, put_away
from aelastic.rehearse.play import NOTICE_S, Play, Script

# Steps that are watched after a fault, and the time that they may take beside what they took undisturbed.
AFTER, SLACK_S = 5, 60.0
FROZEN_S = 3.0
SAME = 1e-6  # relative; "to six digits"
RESUME = "save each so many steps, load the newest checkpoint when the script begins, and count steps from it"
WHOLE = "write a checkpoint under another name, then os.replace it: what is half written is never found"
STATE = "save and load all of the state: optimizer, schedule, random numbers, the place in the data"
NOTICE = "call notice.due() in each step on every rank, save when it is True, then call notice.saved()"
WORLD = "take the world size from the environment, and cut the data by it, also when a checkpoint is loaded"


class Judged(NamedTuple):
    """Of one case: whether it holds, what was seen, and what to change."""

    holds: bool
    text: str
    advice: str = ""
    lost: int = 0  # steps
    resumed_at: int | None = None  # the first step after the fault
    back_s: float | None = None  # from the fault to that
    numbers: str = ""  # of `--metric`, afterwards: `same`, `other`; or they were not compared


class Undisturbed(NamedTuple):
    """How a run goes that nothing disturbs."""

    first: int
    last: int
    step_s: float
    start_s: float  # until the first step
    saves: list[int]  # steps after which files had changed
    metrics: dict[int, float]

    def until(self, step: int) -> float:
        """Seconds that a run may take until a step."""
        return 3 * (self.start_s + (step - self.first + 1) * self.step_s) + SLACK_S

    @property
    def middle(self) -> int:
        """The step of a fault: just after a save, so that it is well before the next."""
        third = self.first + (self.last - self.first) // 3
        after = next((step for step in self.saves if step >= third), third)
        return min(after + 1, max(self.first, self.last - 1))


class CannotError(Exception):
    """The undisturbed run is none to compare with; says why."""


class AstrayError(Exception):
    """A run has not come to the step of the fault; says why."""


class Rehearsals:
    """All of one script.

    Args:
        script: what is run.
        for_s: of the undisturbed run, at most.
    """

    def __init__(self, script: Script, for_s: float) -> None:
        self._script, self._for_s = script, for_s
        self._before = entries_of(script.root, script.apart)
        self._number, self._holds = 0, True  # after a kill between two saves
        self.undisturbed = Undisturbed(0, 0, 0.0, 0.0, [], {})

    def first(self) -> str:
        """Runs it undisturbed; says how it went.

        Raises:
            CannotError: it fails, or shows no progress.
        """
        with self._play() as play:
            code = play.wait_end(self._for_s)
        self._clear()
        step, last = self._script.step, play.last()
        if code:
            raise CannotError(f"undisturbed, it fails: {play.cause}")
        if last < 0 and step is None:
            raise CannotError(
                "undisturbed, it calls no notice.due(): add --progress 'step (\\d+)', as it tells its steps"
            )
        if last < 0:
            raise CannotError(f"undisturbed, it shows no step that matches {step and step.pattern!r} (--progress)")
        if step is None and code is None:
            raise CannotError(
                f"undisturbed, it takes more than {self._for_s:g} s: name more (--for), or add --progress"
            )
        begins = play.first[play.generation]
        took_s = max(max(each.at for each in play.newest.values()) - begins.at, 0.001)
        self.undisturbed = Undisturbed(
            begins.number, last, took_s / max(1, last - begins.number), begins.at - play.began, play.saved_after,
            play.metrics.get(play.generation, {}),
        )  # fmt: skip
        return f"{last - begins.number + 1} steps in {took_s:.3g} s{'' if code == 0 else ', as far as it came'}"

    @property
    def cases(self) -> dict[str, Callable[[], Judged]]:
        """By the words for them."""
        (least, most), nodes, at = self._script.nodes, self._script.played, self.undisturbed.middle
        what, many = ("node", nodes) if most > 1 else ("worker", self._script.workers)
        cases: dict[str, Callable[[], Judged]] = {
            f"rank {nodes * self._script.workers - 1} killed at step {at}": self._killed,
            "killed again within a step": self._killed_twice,
            "killed while it saves": self._killed_writing,
            f"notice, {NOTICE_S} s, at step {at}": self._noticed,
            "notice before the first step": self._noticed_early,
            f"one {what} more ({many + 1})": self._joined if nodes < most else partial(self._resized, many + 1),
        }
        if many > 1:
            cases[f"one {what} fewer ({many - 1})"] = self._lost if nodes > least else partial(self._resized, many - 1)
        return cases | {f"a {'node' if most > 1 else 'rank'} frozen for {FROZEN_S:g} s": self._frozen}

    def run(self, name: str) -> Judged:
        """One of `cases`."""
        try:
            return self.cases[name]()
        except AstrayError as error:
            return Judged(False, str(error))
        finally:
            self._clear()

    def _play(self, nodes: int | None = None, *more: str) -> Play:
        self._number += 1
        return Play(self._script, self._folder, nodes, *more)

    @property
    def _folder(self) -> Path:
        return self._script.apart / f"{self._number:02}"

    def _clear(self) -> None:
        put_away(self._before, self._script.root, self._script.apart, self._folder / "files")

    # The cases.

    def _killed(self) -> Judged:
        with self._play() as play:
            self._reach(play)
            play.kill(max(each.rank for each in play.team))
            judged = self._judge(play, play.generation, to_end=True)
            self._holds = judged.holds
            return judged

    def _killed_twice(self) -> Judged:
        with self._play() as play:
            generation = self._reach(play)
            play.kill(0)
            if play.wait(lambda: play.generation > generation, self.undisturbed.until(self.undisturbed.middle)):
                play.kill(0)
            return self._judge(play, generation + 1)

    def _killed_writing(self) -> Judged:
        saves = self.undisturbed.saves
        if not saves:
            return Judged(True, "it saves nothing that is seen here (--checkpoints DIR)")
        with self._play() as play:
            self._reach(play, self.undisturbed.first)
            usual = set().union(*play.opened().values())
            # The second save: there is an older checkpoint to go back to.
            goal = (saves[1] if len(saves) > 1 else saves[0]) - 1
            generation = self._reach(play, goal)
            play.wait(lambda: play.least() >= goal, SLACK_S)  # the rank that saves may be behind: it is saving
            has_saved = bool(play.saves)
            caught = play.catch_writer(usual, self.undisturbed.until(self.undisturbed.last))
            if not caught:
                return Judged(True, "no save took long enough to be caught")
            judged = self._judge(play, generation, has_saved=has_saved)
        names = ", ".join(sorted(path.name for path in caught)[:2])
        is_whole = judged.holds or not (self._holds or not judged.advice)
        return judged._replace(
            text=f"{judged.text} ({names} was half written)", advice=judged.advice if is_whole else WHOLE
        )

    def _noticed(self) -> Judged:
        with self._play() as play:
            generation, asks = self._reach(play), play.asks
            saved = self._leaves(play)
            if saved is None:
                return self._has_stayed(play)
            judged = self._goes_on(play, generation)
        if asks and (judged.lost > 0 or not saved):
            late = "" if saved else f"not all ranks had saved within {NOTICE_S} s; "
            return Judged(False, f"{late}{judged.text}", NOTICE)
        return judged._replace(text=f"{'saved' if asks else 'no rank has asked for notices'}; {judged.text}")

    def _noticed_early(self) -> Judged:
        with self._play() as play:
            play.wait(lambda: bool(play.team), SLACK_S)
            if self._leaves(play) is None:
                return self._has_stayed(play)
            return self._goes_on(play, play.generation)

    def _leaves(self, play: Play) -> bool | None:
        """A notice for the last node: whether it has saved before it had to go; `None`: it did not go."""
        began, agent = time.monotonic(), play.agents[-1]
        agent.send_signal(signal.SIGUSR1)
        play.wait(lambda: agent.poll() is not None, NOTICE_S + SLACK_S)
        return time.monotonic() - began < NOTICE_S - 2.0 if agent.poll() == EXIT_TRY_AGAIN else None

    def _has_stayed(self, play: Play) -> Judged:
        if play.agents[-1].poll() == 0:
            return Judged(True, f"it came to its end within {NOTICE_S} s")
        return Judged(False, f"it did not end within {NOTICE_S} s: {play.cause}", NOTICE)

    def _goes_on(self, play: Play, generation: int) -> Judged:
        """After a notice: on the nodes that stay, or, if they are too few, as the same command is given again."""
        if self._script.played > self._script.nodes[0]:
            return self._judge(play, generation, same_size=False)
        play.wait_end(SLACK_S)
        play.end()
        with self._play() as again:
            return self._judge(again, 0, before=play)

    def _joined(self) -> Judged:
        return self._while_it_runs(Play.add_node)

    def _lost(self) -> Judged:
        return self._while_it_runs(lambda play: play.agents[-1].kill())

    def _while_it_runs(self, disturb: Callable[[Play], None]) -> Judged:
        with self._play() as play:
            generation = self._reach(play)
            disturb(play)
            return self._sized(self._judge(play, generation, same_size=False))

    def _resized(self, many: int) -> Judged:
        with self._play() as play:
            self._reach(play)
        is_several = self._script.nodes[1] > 1
        option = "--nnodes" if is_several else "--nproc-per-node"
        with self._play(many if is_several else None, option, str(many)) as again:
            return self._sized(self._judge(again, 0, before=play, same_size=False))

    @staticmethod
    def _sized(judged: Judged) -> Judged:
        return judged if judged.holds or judged.advice == RESUME else judged._replace(advice=WORLD)

    def _frozen(self) -> Judged:
        with self._play() as play:
            generation, several = self._reach(play), self._script.nodes[1] > 1
            node = len(play.agents) - 1
            frozen = [each for each in play.team if each.node == node and (several or each.rank == 0)]
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                if several:
                    play.agents[node].send_signal(signum)
                play.signal(signum, frozen)
                if signum == signal.SIGSTOP:
                    play.wait(lambda: False, FROZEN_S)
            # Its own steps, if it tells them: others may have gone on without it.
            own = {(generation, each.rank) for each in frozen} & play.newest.keys() or {*play.newest}
            goal = min(max(play.newest[of].number for of in own) + AFTER, self.undisturbed.last)

            def is_past() -> bool:
                return play.last(generation + 1) >= goal or any(play.newest[of].number >= goal for of in own)

            is_on = play.wait(is_past, self.undisturbed.until(goal))
            if not is_on or (play.generation > generation and not several):
                return Judged(
                    False, f"it did not go on: {play.cause}", "limits that a pause of seconds breaks are too short"
                )
            return Judged(True, "it went on" if play.generation == generation else "it went on after a restart")

    # What they have in common.

    def _reach(self, play: Play, step: int | None = None) -> int:
        """Waits for a step, the fault's if none is named; gives the generation that makes it.

        Raises:
            AstrayError: it did not come to it as the undisturbed run did.
        """
        usual = self.undisturbed
        goal = usual.middle if step is None else step
        is_there = play.wait(lambda: play.last() >= goal, usual.until(goal))
        began = next((f"began at step {each.number}" for each in play.first.values()), "had no step to make")
        if play.agents[0].poll() == 0 if not play.first else began != f"began at step {usual.first}":
            raise AstrayError(f"it {began}: name the folder that it saves to: --checkpoints DIR")
        if not is_there:
            raise AstrayError(f"it did not come as far: {play.cause}")
        return play.generation

    def _judge(
        self, play: Play, after: int, *, before: Play | None = None, to_end: bool = False, same_size: bool = True,
        has_saved: bool | None = None,
    ) -> Judged:  # fmt: skip
        """After a fault: how a run goes on.

        Args:
            play: that goes on.
            after: with workers of a later generation than this.
            before: the run that had the fault, if it is another.
            to_end: it is watched until it ends.
            same_size: as many workers as undisturbed.
            has_saved: before the fault; `None`: if files had changed.
        """
        usual, old = self.undisturbed, before or play
        reached, stamps, began = old.last(), dict(old.stamps), time.monotonic()
        play.wait(lambda: play.generation > after, usual.until(max(reached, usual.first)))
        if before is None:
            reached = play.last(most=after)
        if play.generation <= after:
            if play.agents[0].poll() == 0:
                return Judged(True, "it came to its end before that")
            return self._stuck(play, "it did not come back")
        goal, by_calls = min(max(reached, usual.first) + AFTER, usual.last), self._script.step is None
        if to_end or (by_calls and reached >= usual.first):  # then calls are counted from the end
            goal = usual.last
            play.wait_end(usual.until(goal))
            play.align(play.generation, goal, len(usual.metrics))
        play.wait(lambda: play.last(after + 1) >= goal, usual.until(goal))
        first, newest = play.first[min(each for each in play.first if each > after)], play.last(after + 1)
        lost = reached + 1 - first.number
        has_saved = any(step < reached for step in old.saves) if has_saved is None else has_saved
        seen = Judged(True, "", lost=lost, resumed_at=first.number, back_s=round(max(0.0, first.at - began), 3))
        if by_calls and not same_size and play.agents[0].poll() == 0:
            return Judged(True, "it came to its end")  # how many calls are left is not known
        if first.number <= usual.first and lost > 0 and (has_saved or not usual.saves):
            over = sorted(path.name for path in changed_in(stamps, play.stamps))
            wrote = f"; overwrote {', '.join(over[:2])}" if over else ""
            saves = f"though it had saved{wrote}" if has_saved else "and it saves nothing"
            text = f"began again at step {first.number}: {lost} lost, {saves}"
            return seen._replace(holds=False, text=text, advice=RESUME)
        if lost < 0:
            text = f"steps {reached + 1} to {first.number - 1} were never made"
            return seen._replace(holds=False, text=text, advice=RESUME)
        if newest < goal and (same_size or play.agents[0].poll() != 0):
            return self._stuck(play, f"went on at step {first.number}, and came to {newest} of {goal}")
        is_resumed = has_saved or first.number > usual.first
        began_again = f"resumed at {first.number} ({lost} lost)" if is_resumed else f"began again ({lost} lost)"
        how = began_again if reached >= 0 else "began"
        told = same_size and play.metrics.get(play.generation, {})
        wrong = next(self._differences(told or {}), "")
        # Numbers that differ before the fault, too, are those of a script that is not deterministic.
        if wrong and reached >= 0 and not any(self._differences(old.metrics.get(1, {}))):
            return seen._replace(holds=False, text=f"{how}; {wrong}", advice=STATE, numbers="other")
        is_same = told and not wrong
        text = f"{how}, back in {seen.back_s:.2g} s{f', numbers to step {newest} the same' if is_same else ''}"
        return seen._replace(text=text, numbers="same" if is_same else "")

    @staticmethod
    def _stuck(play: Play, what: str) -> Judged:
        if play.is_on:
            play.keep_stacks()
        return Judged(False, f"{what}: {'its workers stand, see stacks.txt' if play.is_on else play.cause}")

    def _differences(self, metrics: dict[int, float]) -> Iterator[str]:
        for step, value in sorted(metrics.items()):
            usual = self.undisturbed.metrics.get(step)
            if usual is not None and not math.isclose(value, usual, rel_tol=SAME):
                yield f"at step {step} the number is {value:g} in the place of {usual:g}"
