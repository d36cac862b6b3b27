"""Rehearses recovery in place: kills ranks of a script that opts in, and examines its habits.

Each of these runs is compared with the undisturbed one: parameters at the same steps, to six digits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from aelastic.tools.rehearse.judging import SLACK_S, CaseVerdict
from aelastic.tools.rehearse.noted import Habit, Noted
from aelastic.tools.rehearse.trial import Trial, Worker
from aelastic.training.rehearsed import notes

PREFIX = "in place: "
AFTER_NOTES = 8  # steps with noted parameters that are watched after a fault
# With more ranks, DDP adds gradients in another order in the first step after a recovery.  It is a difference in the
# last digit, but may grow over thousands of steps, so only some steps after the fault are compared.
SAME_ORDER_RANKS = 2
LEAVE_S = 20.0  # from a loss until the agents end the round: it takes milliseconds
NOT_IN_TIME = "did not leave its round in time, its stack is in agent.log"
LATE = "catch Exception, never BaseException, around the loop; let no single call of a step take longer than 5 s"


class Usual(NamedTuple):
    """The undisturbed run."""

    noted: Noted
    is_whole: bool  # it ran to its end
    took_s: float

    @property
    def fault_at(self) -> int:
        """The step of a fault: after a third of the run, one whose parameters are noted."""
        steps = self.noted.steps
        first, last = steps[0], steps[-1]
        return next(step for step in steps if step >= first + (last - first) // 3)

    def nth_after(self, step: int, count: int) -> int:
        """Returns the step this many notes after this one, or the last one with a note."""
        later = [each for each in self.noted.steps if each > step]
        return later[:count][-1] if later else step


class InPlace:
    """The cases.

    Args:
        trial: begins a run, with recovery in place.
        ranks: of the job.
    """

    def __init__(self, trial: Callable[[], Trial], ranks: int) -> None:
        self._trial = trial
        self._ranks = ranks
        self._usual = Usual(Noted(), False, 0.0)
        self.habits: dict[Habit, None] = {}  # in the order in which they were found
        self.cases: dict[str, Callable[[], CaseVerdict]] = {
            f"{PREFIX}rank 0 killed": self._killed,
            f"{PREFIX}killed again at once": self._killed_again,
        }
        if ranks > 2:  # else no rank is left that has the state
            self.cases[f"{PREFIX}a second rank killed"] = self._two_killed

    def take_usual(self, trial: Trial, *, is_whole: bool) -> None:
        """Takes the results of the undisturbed run."""
        self._usual = Usual(trial.noted, is_whole, time.monotonic() - trial.began)
        self._take_habits(trial)

    @property
    def why_not(self) -> str:
        """Says why nothing can be rehearsed; empty if it can."""
        if not self._usual.noted.is_in_place:
            return "the script does not use @in_place, or --recovery restart turns it off"
        return "" if self._ranks > 1 else "with one worker, nobody has the state once it is lost"

    # The cases.

    def _killed(self) -> CaseVerdict:
        """Kills rank 0, which DDP takes the weights from; the script then runs to its end."""
        with self._trial() as trial:
            if (cannot := self._reach(trial)) is not None:
                return cannot
            fault = _Fault(trial)
            fault.kill(0)
            return self._judge(trial, fault, to_end=self._usual.is_whole)

    def _killed_again(self) -> CaseVerdict:
        """Kills the last rank, and its replacement as the next round begins."""
        with self._trial() as trial:
            if (cannot := self._reach(trial)) is not None:
                return cannot
            fault = _Fault(trial)
            fault.kill(self._ranks - 1)
            if trial.wait(lambda: trial.team[0].round > fault.round_of_agents, self._limit_s):
                fault.kill(self._ranks - 1)
            return self._judge(trial, fault)

    def _two_killed(self) -> CaseVerdict:
        """Kills the last rank, and another one while the others leave the round."""
        with self._trial() as trial:
            if (cannot := self._reach(trial)) is not None:
                return cannot
            fault = _Fault(trial)
            fault.kill(self._ranks - 1)
            trial.wait(lambda: any(each["event"] == "restarting" for each in trial.recoveries), LEAVE_S)
            fault.kill(1)
            return self._judge(trial, fault)

    def _reach(self, trial: Trial) -> CaseVerdict | None:
        """Waits for the step of the fault; returns a judgement if the run does not reach it."""
        if not self._usual.noted.steps:
            return CaseVerdict(None, "it commits no step")
        goal = self._usual.fault_at
        if trial.wait(lambda: trial.noted.newest() >= goal, self._limit_s) and trial.is_on:
            return None
        if trial.agents[0].poll() == 0:
            return CaseVerdict(None, "it finished before that")
        return CaseVerdict(False, f"the run did not reach step {goal}: {trial.why_it_stands()}")

    @property
    def _limit_s(self) -> float:
        return 3 * self._usual.took_s + SLACK_S

    # How the script is verdict.

    def _judge(self, trial: Trial, fault: _Fault, *, to_end: bool = False) -> CaseVerdict:
        usual, noted = self._usual, trial.noted
        goal = usual.nth_after(max(fault.step, noted.newest()), AFTER_NOTES)
        if to_end:
            trial.wait_end(self._limit_s)
        is_there = trial.wait(lambda: noted.newest(fault.round) >= goal, self._limit_s)
        self._take_habits(trial)
        if noted.round <= fault.round:
            return self._not_resumed(trial)
        resumed_at = max(each.step for each in noted.shared[noted.round].values())
        lost = max(0, fault.step - resumed_at)
        back_s = max(each.at for each in noted.shared[noted.round].values()) - fault.at
        seen = CaseVerdict(True, "", lost=lost, resumed_at=resumed_at, back_s=round(back_s, 3))
        if (broken := self._broken(seen, trial, fault)) is not None:
            return broken
        if not is_there or (to_end and trial.agents[0].poll() != 0):
            where = f"reached step {noted.newest(fault.round)} of {goal}"
            return seen._replace(passed=False, text=f"recovered in place and {where}: {trial.why_it_stands()}")
        return self._compared(seen, trial, fault)

    def _not_resumed(self, trial: Trial) -> CaseVerdict:
        if trial.agents[0].poll() == 0:
            return CaseVerdict(None, "it finished before that")
        return CaseVerdict(False, f"it did not continue: {trial.why_it_stands()}")

    def _broken(self, seen: CaseVerdict, trial: Trial, fault: _Fault) -> CaseVerdict | None:
        """Returns what happened instead, if not all survivors have continued with their state."""
        start = f"resumed at {seen.resumed_at} ({seen.lost} lost)"
        lost = fault.survivors_lost()
        ends = fault.ends_of_survivors()
        words = "; ".join(f"rank {rank} {NOT_IN_TIME if end is None else end}" for rank, end in ends.items())
        advice = LATE if None in ends.values() else ""
        if len(lost) == len(fault.survivors):
            reasons = [each["reason"] for each in trial.recoveries if each["event"] == "not_recovered"]
            why = words or (reasons or [trial.cause])[-1]
            return seen._replace(passed=False, text=f"restarted instead, {start}: {why}", advice=advice)
        if lost:
            text = f"not all survivors kept their processes, {start}: {words}"
            return seen._replace(passed=False, text=text, advice=advice)
        if all(each["source_rank"] < 0 for each in fault.recovered()):
            text = f"processes were kept, but no rank had a whole state: {start}"
            return seen._replace(passed=False, text=text, checkpoint="whole" if seen.resumed_at else "")
        return None

    def _compared(self, seen: CaseVerdict, trial: Trial, fault: _Fault) -> CaseVerdict:
        kept, size = len(fault.survivors), len(trial.team)
        took_ms = 1000 * fault.took_s()
        how = f"recovered in {took_ms:.0f} ms, {kept} of {size} processes kept, {seen.lost} lost"
        noted, usual = trial.noted, self._usual.noted
        last = math.inf
        if size > SAME_ORDER_RANKS:
            last = self._usual.nth_after(seen.resumed_at or 0, AFTER_NOTES)
        compared = [step for step in noted.steps_after(fault.round) if step <= last]
        if not any(any(each.values()) for each in noted.parameters.values()) or not compared:
            return seen._replace(text=f"{how}; no parameters to compare")
        if noted.is_random(usual, fault.round):
            return seen._replace(text=f"{how}; the parameters differ in each run")
        wrong = noted.differs_at(usual, fault.round, last)
        if wrong is None:
            return seen._replace(text=f"{how}, parameters to step {compared[-1]} the same", numbers="same")
        generators = noted.random_that_differ(usual, fault.round)
        self.habits[Habit(notes.RANDOM, "", ", ".join(generators))] = None
        return seen._replace(passed=False, text=f"{how}; the parameters of step {wrong} differ", numbers="other")

    def _take_habits(self, trial: Trial) -> None:
        self.habits.update(trial.noted.habits)


class _Fault:
    """Ranks of a run that are killed, and what happens to the others."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.at = time.monotonic()
        self.step = trial.committed()
        self.round = trial.noted.round  # as workers count them
        self.round_of_agents = trial.team[0].round
        self.survivors: list[Worker] = [*trial.team]

    def kill(self, rank: int) -> None:
        self.survivors = [each for each in self.survivors if each.rank != rank]
        self._trial.kill(rank)

    def survivors_lost(self) -> list[Worker]:
        """Returns survivors whose processes are not in the last round."""
        kept = {each.pid for each in self._trial.team}
        return [each for each in self.survivors if each.pid not in kept]

    def ends_of_survivors(self) -> dict[int, str | None]:
        """Returns by rank how survivors ended before the recovery was given up, if it was; None: they were stopped."""
        ranks, ends = {each.rank for each in self.survivors}, dict[int, str | None]()
        for each in self._trial.recoveries:
            if each["event"] == "not_recovered":
                break
            if each["event"] == "worker_ended" and each["rank"] in ranks - ends.keys():
                if each["outcome"] == "failed":
                    message = each["failure"]["message"].strip().partition("\n")[0]
                    ends[each["rank"]] = f"failed: {message}"
                elif each["outcome"] == "stopped":
                    ends[each["rank"]] = None
        return ends

    def recovered(self) -> list[dict[str, Any]]:
        """Returns the agents' records of the recovery, `recovered`."""
        return [each for each in self._trial.recoveries if each["event"] == "recovered"]

    def took_s(self) -> float:
        """Returns the time from a worker's end until all ranks had the state; summed if there were several rounds."""
        by_round: dict[int, float] = {}
        for each in self.recovered():
            by_round[each["round"]] = max(by_round.get(each["round"], 0.0), each["duration_s"])
        return sum(by_round.values())
