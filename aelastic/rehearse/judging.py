"""What is held against a script: how it goes on after a fault, beside how it goes when nothing disturbs it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from aelastic.rehearse.files import overwritten
from aelastic.rehearse.play import Play

# Steps that are watched after a fault, and the time that they may take beside what they took undisturbed.
AFTER, SLACK_S = 5, 60.0
SAME = 1e-6  # relative; "to six digits"
RESUME = "save each so many steps, load the newest checkpoint when the script begins, and count steps from it"
STATE = "save and load all of the state: optimizer, schedule, random numbers, the place in the data"


class Judged(NamedTuple):
    """Of one case: whether it holds, what was seen, and what to change."""

    holds: bool | None  # `None`: it was not tested
    text: str
    advice: str = ""
    lost: int = 0  # steps
    resumed_at: int | None = None  # the first step after the fault
    back_s: float | None = None  # from the fault to that
    numbers: str = ""  # of `--metric`, afterwards: `same`, `other`; or they were not compared
    checkpoint: str = ""  # that it went on from: `whole`, `half-written`, `overwritten`; or there was none


class Undisturbed(NamedTuple):
    """How a run goes that nothing disturbs."""

    first: int
    last: int
    is_whole: bool  # it came to its end
    step_s: float
    start_s: float  # until the first step
    stride: int  # of the steps that it tells
    saves: list[int]  # steps after which files had changed
    metrics: dict[int, float]

    def until(self, step: int) -> float:
        """Seconds that a run may take until a step."""
        return 3 * (self.start_s + (step - self.first + 1) * self.step_s) + SLACK_S

    @property
    def middle(self) -> int:
        """The step of a fault: just after a save, which may take some steps, so that it is well before the next."""
        third = self.first + (self.last - self.first) // 3
        over = [step for step, later in zip(self.saves, [*self.saves[1:], math.inf], strict=False) if later > step + 1]
        after = next((step for step in over if third <= step < self.last - 1), third)
        return min(after + 1, max(self.first, self.last - 1))

    @property
    def second_save(self) -> int:
        """The step after which files change for the second time, if they do: there is an older checkpoint then."""
        begins = [step for step, before in zip(self.saves, [-math.inf, *self.saves], strict=False) if step > before + 1]
        return begins[1] if len(begins) > 1 else self.saves[2 if len(self.saves) > 3 else 0]

    def judge(
        self, play: Play, after: int, *, before: Play | None = None, to_end: bool = False, same_size: bool = True,
        has_saved: bool | None = None,
    ) -> Judged:  # fmt: skip
        """After a fault: how a run goes on.

        Args:
            play: that goes on.
            after: with workers of a later round than this.
            before: the run that had the fault, if it is another.
            to_end: it is watched until it ends.
            same_size: as many workers as undisturbed.
            has_saved: before the fault; `None`: if files had changed.
        """
        old, began = before or play, time.monotonic()
        reached, stamps = old.last(), dict(old.stamps)
        play.wait(lambda: play.round > after, self.until(max(reached, self.first)))
        reached = max(play.last(most=after) if before is None else reached, self.first - 1)
        goal = self._goal(play, after, reached, to_end=to_end, same_size=same_size)
        if isinstance(goal, Judged):
            return goal
        first, newest = play.first[min(each for each in play.first if each > after)], play.last(after + 1)
        if has_saved is None:
            has_saved = any(step < reached for step in old.saves)
        seen = Judged(
            True, "", lost=reached + 1 - first.number, resumed_at=first.number,
            back_s=round(max(0.0, first.at - began), 3),
        )  # fmt: skip
        if (unfit := self._has_begun_again(seen, overwritten(stamps, play.stamps), has_saved=has_saved)) is not None:
            return unfit
        if seen.lost < -self.stride:
            text = f"steps {reached + 1} to {first.number - 1} were never made"
            return seen._replace(holds=False, text=text, advice=RESUME)
        if newest < goal and (same_size or play.agents[0].poll() != 0):
            return Judged(
                False, f"went on at step {first.number}, and came to {newest} of {goal}: {play.why_it_stands()}"
            )
        return self._compared(seen, play, reached, old.metrics(min(old.first, default=0)) if same_size else None)

    def _goal(self, play: Play, after: int, reached: int, *, to_end: bool, same_size: bool) -> int | Judged:
        """Waits until a run has come as far as it is watched; gives the step, or what is clear before."""
        if play.round <= after:
            if play.agents[0].poll() == 0:
                return Judged(None, "it came to its end before that")
            return Judged(False, f"it did not come back: {play.why_it_stands()}")
        goal = min(max(reached, self.first) + AFTER, self.last)
        by_calls = play.script.step is None
        if (to_end and self.is_whole) or (by_calls and reached >= self.first):  # then calls are counted from the end
            goal = self.last
            if play.wait_end(self.until(goal)) != 0:
                return Judged(False, f"it went on, and did not come to its end: {play.why_it_stands()}")
            if by_calls and not same_size:
                return Judged(True, "it came to its end")  # how many calls are left is not known
            if by_calls:
                play.align(goal, len(self.metrics))
        play.wait(lambda: play.last(after + 1) >= goal, self.until(goal))
        return goal

    def _has_begun_again(self, seen: Judged, over: list[str], *, has_saved: bool) -> Judged | None:
        """What to hold against a script that begins again, if so: one that had not saved yet may."""
        never = not self.saves or (self.is_whole and min(self.saves) >= self.last)
        if seen.lost <= 0 or (seen.resumed_at or 0) > self.first or not (has_saved or never):
            return None
        saves = "though it had saved" if has_saved else "and it saves nothing before its end"
        wrote = f"; overwrote {', '.join(over[:2])}" if over else ""
        text = f"began again at step {seen.resumed_at}: {seen.lost} lost, {saves}{wrote}"
        return seen._replace(holds=False, text=text, advice=RESUME, checkpoint="overwritten" if over else "")

    def _compared(self, seen: Judged, play: Play, reached: int, earlier: dict[int, float] | None) -> Judged:
        """A run that goes on as it should: whether its numbers are those of the undisturbed one.

        Args:
            seen: of it so far.
            play: that went on.
            reached: the last step before the fault.
            earlier: its numbers before the fault; `None`: there is nothing to compare.
        """
        is_resumed, had_begun = (seen.resumed_at or 0) > self.first, reached >= self.first
        seen = seen._replace(checkpoint="whole" if is_resumed else "")
        how = f"resumed at {seen.resumed_at} ({seen.lost} lost)" if is_resumed else f"began again ({seen.lost} lost)"
        how = how if had_begun or is_resumed else "began"
        told = {} if earlier is None else play.metrics(play.round)
        wrong = next(self._differences(told), "")
        # Numbers that differ before the fault, too, are those of a script that is not deterministic.
        if wrong and had_begun and not any(self._differences(earlier or {})):
            return seen._replace(holds=False, text=f"{how}; {wrong}", advice=STATE, numbers="other")
        is_same = told and not wrong
        numbers = f", numbers to step {play.last()} the same" if is_same else ""
        text = f"{how}, back in {seen.back_s:.2g} s{numbers}"
        return seen._replace(text=text, numbers="same" if is_same else "")

    def _differences(self, metrics: dict[int, float]) -> Iterator[str]:
        for step, value in sorted(metrics.items()):
            usual = self.metrics.get(step, value)
            if not (math.isclose(value, usual, rel_tol=SAME) or (math.isnan(value) and math.isnan(usual))):
                yield f"at step {step} the number is {value:g} in the place of {usual:g}"
