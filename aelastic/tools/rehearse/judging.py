"""Judges a script: compares how it continues after a fault with its undisturbed run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

from aelastic.tools.rehearse.files import overwritten
from aelastic.tools.rehearse.trial import Trial

# Steps that are watched after a fault, and the time that they may take in addition to that of the undisturbed run.
AFTER, SLACK_S = 5, 60.0
SAME = 1e-6  # relative; "to six digits"
RESUME = "save every N steps, load the newest checkpoint when the script starts, and count steps from it"
STATE = "save and load the whole state: optimizer, schedule, random numbers, position in the data"


class CaseVerdict(NamedTuple):
    """The result of one case: whether the script passed it, what was seen, and what to change."""

    passed: bool | None  # `None`: it was not tested
    text: str
    advice: str = ""
    lost: int = 0  # steps
    resumed_at: int | None = None  # the first step after the fault
    back_s: float | None = None  # from the fault to that
    numbers: str = ""  # of `--metric`, afterwards: `same`, `other`; empty if they were not compared
    checkpoint: str = ""  # that it resumed from: `whole`, `half-written`, `overwritten`; empty without one


class Undisturbed(NamedTuple):
    """The undisturbed run."""

    first: int
    last: int
    is_whole: bool  # it ran to its end
    step_s: float
    start_s: float  # until the first step
    stride: int  # of the steps that it prints
    saves: dict[str, list[int]]  # steps after which files had changed, by their kind
    metrics: dict[int, float]

    def until(self, step: int) -> float:
        """Returns the seconds that a run may take until a step."""
        return 3 * (self.start_s + (step - self.first + 1) * self.step_s) + SLACK_S

    @property
    def saved_by(self) -> int | None:
        """The step by which each kind of file existed, except those written only at the end; `None` without any."""
        return max((at[0] for at in self.saves.values() if at[0] < self.last - 1), default=None)

    @property
    def checkpoints(self) -> list[tuple[int, int]]:
        """After which steps saves began and ended, of the kind of file that comes last and again."""
        kinds = sorted((at for at in self.saves.values() if at[0] < self.last - 1), reverse=True)
        groups = [[*zip(_without(at, -1), _without(at, 1), strict=True)] for at in kinds]
        return next((each for each in groups if len(each) > 1), groups[0] if groups else [])

    @property
    def middle(self) -> int:
        """The step of a fault: just after a save, so that it is well before the next."""
        third = max(self.first + (self.last - self.first) // 3, self.saved_by or 0)
        after = next((end for _, end in self.checkpoints if third <= end < self.last - 1), third)
        return min(after + 1, max(self.first, self.last - 1))

    @property
    def second_save(self) -> int:
        """The step after which files change for the second time, if they do: there is an older checkpoint then."""
        (begin, end), *later = self.checkpoints
        return later[0][0] if later else begin + 2 * (end > begin + 3)

    def judge(
        self, trial: Trial, after: int, *, before: Trial | None = None, to_end: bool = False, same_size: bool = True,
        spare: int = 1,
    ) -> CaseVerdict:  # fmt: skip
        """Judges how a run continues after a fault.

        Args:
            trial: the run that continues.
            after: with workers of a later round than this.
            before: the run that had the fault, if it is another.
            to_end: watch it until it ends.
            same_size: it has as many workers as the undisturbed run.
            spare: how many checkpoints may have been half written.
        """
        old, began = before or trial, time.monotonic()
        reached, least, stamps = old.last(), old.least() + self.stride - 1, dict(old.stamps)
        trial.wait(lambda: trial.round > after, self.until(max(reached, self.first)))
        reached = max(trial.last(most=after) if before is None else reached, self.first - 1)
        goal = self._goal(trial, after, reached, to_end=to_end, same_size=same_size)
        if isinstance(goal, CaseVerdict):
            return goal
        first, newest = trial.first[min(each for each in trial.first if each > after)], trial.last(after + 1)
        seen = CaseVerdict(
            True, "", lost=reached + 1 - first.number, resumed_at=first.number,
            back_s=round(max(0.0, first.at - began), 3),
        )  # fmt: skip
        if (unfit := self._has_forgotten(seen, reached, least, overwritten(stamps, trial.stamps), spare)) is not None:
            return unfit
        if newest + self.stride <= goal and (same_size or trial.agents[0].poll() != 0):
            return CaseVerdict(
                False, f"resumed at step {first.number} and reached step {newest} of {goal}: {trial.why_it_stands()}"
            )
        return self._compared(seen, trial, reached, old.metrics(min(old.first, default=0)) if same_size else None)

    def _goal(self, trial: Trial, after: int, reached: int, *, to_end: bool, same_size: bool) -> int | CaseVerdict:
        """Waits until a run has come as far as it is watched; returns the step, or a judgement that is clear before."""
        if trial.round <= after:
            if trial.agents[0].poll() == 0:
                return CaseVerdict(None, "it finished before that")
            return CaseVerdict(False, f"it did not resume: {trial.why_it_stands()}")
        goal = min(max(reached, self.first) + AFTER, self.last)
        # Calls are counted from the end, and so are metrics if the script prints no steps.
        by_calls = trial.script.step is None and (not trial.commits or bool(self.metrics))
        if (to_end and self.is_whole) or (by_calls and reached >= self.first):  # then calls are counted from the end
            goal = self.last
            if trial.wait_end(self.until(goal)) != 0:
                return CaseVerdict(False, f"it resumed but did not finish: {trial.why_it_stands()}")
            if by_calls and not trial.commits and not same_size and trial.last(after + 1) != self.last - self.first:
                return CaseVerdict(True, "it finished")  # how many calls are left is not known
            if by_calls:
                trial.align(goal, len(self.metrics))
        trial.wait(lambda: trial.last(after + 1) >= goal, self.until(goal))
        return goal

    def _has_forgotten(
        self, seen: CaseVerdict, reached: int, least: int, over: list[str], spare: int
    ) -> CaseVerdict | None:
        """Judges where a script resumes; `None` if that is right.  One that has not saved yet may start over.

        Args:
            seen: the result so far.
            reached: the last step before the fault.
            least: the step at which the slowest rank may have been then.
            over: names of files that it has overwritten.
            spare: how many checkpoints may have been half written.
        """
        start, saved_by = seen.resumed_at or 0, self.saved_by
        if seen.lost > 0 and start <= self.first and (saved_by is None or least > saved_by):
            text = f"started over at step {start}: {seen.lost} lost"
            if saved_by is None and not self.is_whole:
                return seen._replace(passed=None, text=f"{text}; it saved nothing while it was watched (--for)")
            text += ", and it saves nothing before it ends" if saved_by is None else ", though it had saved"
            wrote = f"; overwrote {', '.join(over[:2])}" if over else ""
            checkpoint = "overwritten" if over else ""
            return seen._replace(passed=False, text=f"{text}{wrote}", advice=RESUME, checkpoint=checkpoint)
        # A save may be seen a step before it is reported, and is over by the step after the next.
        whole = [begin for begin, end in self.checkpoints if end + 2 * self.stride < least]
        older, newer = whole[: len(whole) - spare][-2:] if len(whole) - spare >= 2 else (-math.inf, -math.inf)
        if self.first < start <= (older + newer) / 2:
            text = f"resumed at {start} ({seen.lost} lost), though it had saved after step {newer}"
            return seen._replace(passed=False, text=text, advice=RESUME)
        if seen.lost < -2 * self.stride:
            text = f"steps {reached + 1} to {start - 1} were skipped"
            return seen._replace(passed=False, text=text, advice=RESUME)
        return None

    def _compared(self, seen: CaseVerdict, trial: Trial, reached: int, earlier: dict[int, float] | None) -> CaseVerdict:
        """Returns whether the numbers of a run that resumed properly are those of the undisturbed one.

        Args:
            seen: the result so far.
            trial: the run that resumed.
            reached: the last step before the fault.
            earlier: its numbers before the fault; `None`: there is nothing to compare.
        """
        is_resumed, had_begun = (seen.resumed_at or 0) > self.first, reached >= self.first
        seen = seen._replace(checkpoint="whole" if is_resumed else "")
        how = f"resumed at {seen.resumed_at} ({seen.lost} lost)" if is_resumed else f"started over ({seen.lost} lost)"
        how = how if had_begun or is_resumed else "began"
        after = {} if earlier is None else trial.metrics(trial.round)
        after = dict(sorted(after.items())[1:])  # the first may be a mean of the last steps, which begins again
        wrong = next(self._differences(after), "")
        # If numbers also differ before the fault, the script is not deterministic.
        is_random = any(self._differences(earlier or {}))
        if wrong and had_begun and not is_random:
            return seen._replace(passed=False, text=f"{how}; {wrong}", advice=STATE, numbers="other")
        is_same = after.keys() & self.metrics.keys() and not wrong
        numbers = (
            f", numbers to step {trial.last()} the same" if is_same else ", the numbers differ in each run" * is_random
        )
        text = f"{how}, back in {seen.back_s:.2g} s{numbers}"
        return seen._replace(text=text, numbers="same" if is_same else "")

    def _differences(self, metrics: dict[int, float]) -> Iterator[str]:
        for step, value in sorted(metrics.items()):
            usual = self.metrics.get(step, value)
            if not (math.isclose(value, usual, rel_tol=SAME) or (math.isnan(value) and math.isnan(usual))):
                yield f"at step {step} the number is {value:g} instead of {usual:g}"


def _without(steps: list[int], by: int) -> list[int]:
    """Returns the first (-1) or the last (1) of each series of consecutive steps."""
    known = set(steps)
    return [step for step in steps if step + by not in known]
