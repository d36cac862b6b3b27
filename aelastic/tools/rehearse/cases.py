"""The faults that a script is rehearsed with, and how it is verdict."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial

from aelastic.errors import EXIT_TRY_AGAIN
from aelastic.rdzv.leader.drain import MARGIN_S
from aelastic.tools.rehearse.files import Files, by_kind, kind_of, overwritten
from aelastic.tools.rehearse.in_place import InPlace
from aelastic.tools.rehearse.judging import AFTER, RESUME, SLACK_S, CaseVerdict, Undisturbed
from aelastic.tools.rehearse.trial import NOTICE_S, Script, Trial

FROZEN_S = 3.0
# For the time of an average case: agents end, workers start more than once, and make this share of the steps.
EACH_S = 1.0
STARTS = 1.5
SHARE = 0.65
WHOLE = "write each checkpoint under a temporary name, then os.replace it, so that no half-written file is loaded"
NOTICE = "call notice.due() in each step on every rank, save when it is True, then call notice.saved()"
WORLD = "read the world size from the environment and split the data by it, also after loading a checkpoint"
PAUSE = "raise each timeout that a pause of a few seconds exceeds"


class CannotError(Exception):
    """The undisturbed run cannot be compared with; the message gives the reason."""


class AstrayError(Exception):
    """A run did not reach the step of the fault; the message gives the reason."""


class Rehearsals:
    """All cases of one script.

    Args:
        script: what is run.
        files: those that it leaves.
        metric: a pattern of a number that must be the same.
        for_s: maximum length of the undisturbed run, from its first step.
        watch: called with each run, whenever it has been looked at.
    """

    def __init__(
        self,
        script: Script,
        files: Files,
        metric: re.Pattern[str] | None,
        for_s: float,
        watch: Callable[[Trial], None] = lambda _: None,
    ) -> None:
        self._script, self._files, self._metric, self._for_s, self._watch = script, files, metric, for_s, watch
        self._number, self._between = 0, CaseVerdict(True, "", resumed_at=0)  # after a kill between two saves
        self.usual = Undisturbed(0, 0, True, 0.0, 0.0, 1, {}, {})
        (least, most), nodes = script.nodes, script.nodes_at_first
        what, many = ("node", nodes) if script.is_several else ("worker", script.workers)
        more, fewer = partial(self._sized, many + 1, nodes < most), partial(self._sized, many - 1, nodes > least)
        self._asks = False  # the script calls `notice.due`
        self._notices: dict[str, Callable[[], CaseVerdict]] = {
            f"a notice of {NOTICE_S} s": partial(self._noticed, is_early=False),
            "a notice before the first step": partial(self._noticed, is_early=True),
        }
        self.cases: dict[str, Callable[[], CaseVerdict]] = {  # by their names in the report
            "a rank killed": self._killed,
            "killed again within a step": self._killed_twice,
            "killed while it saves": self._killed_writing,
            **self._notices,
            f"one {what} more": more,
            f"one {what} fewer": fewer,
            f"a {'node' if script.is_several else 'rank'} frozen for {FROZEN_S:g} s": self._frozen,
        }
        if many == 1:
            del self.cases[f"one {what} fewer"]
        self.in_place = InPlace(partial(self._trial, is_in_place=True), nodes * script.workers)
        self.cases |= self.in_place.cases

    def first(self) -> str:
        """Runs it undisturbed, and returns how it went.  A script that cannot recover in place then has fewer cases.

        Raises:
            CannotError: it fails, or shows no progress.
        """
        try:
            with self._trial(is_in_place=True) as trial:
                trial.wait(lambda: bool(trial.first), max(self._for_s, SLACK_S))
                code = trial.wait_end(self._for_s)
                self._asks = trial.asks
        finally:
            self._clear()
        self.in_place.take_usual(trial, is_whole=code == 0)
        self._check(trial, code)
        if self.in_place.why_not:
            self.cases = {name: case for name, case in self.cases.items() if name not in self.in_place.cases}
        begins, last = trial.first[trial.round], trial.last()
        kinds = by_kind(trial.changes, last - begins.number, len(trial.looks))
        left = {kind_of(path) for path in trial.stamps}  # others are half written, or were removed in the end
        self._files.logs = left - kinds.keys()
        saves = {kind: at for kind, at in kinds.items() if kind in left} or kinds
        took_s = max(max(each.at for each in trial.newest.values()) - begins.at, 0.001)
        self.usual = Undisturbed(
            begins.number, last, code == 0, took_s / max(1, last - begins.number), begins.at - trial.began,
            trial.stride, saves, trial.metrics(trial.round),
        )  # fmt: skip
        return f"{last - begins.number + 1} steps in {took_s:.3g} s{'' if code == 0 else ', as far as it came'}"

    def _check(self, trial: Trial, code: int | None) -> None:
        step, metric, before, why = self._script.step, self._metric, self._files.before, ""
        if code:
            why = f"the undisturbed run failed: {trial.cause}"
        elif len({each.round for each in trial.workers}) > 1:
            why = f"the undisturbed run was restarted: {trial.cause}"
        elif step is None and code is None and not trial.commits:
            why = f"the undisturbed run takes more than {self._for_s:g} s: raise --for, or add --progress"
        elif trial.last() < 0:
            no_calls = (
                "cannot tell the script's steps, as it neither commits steps nor calls notice.due(): "
                "add --progress, as in 'step (\\d+)'"
            )
            why = f"the script printed no step that matches '{step.pattern}' (--progress)" if step else no_calls
        elif trial.goes_back:
            newest, then = trial.goes_back
            why = f"the script's steps go back from {newest} to {then}: let --progress match a number that grows"
        elif trial.no_number:
            why = f"{trial.no_number!r} is not a number: let --metric match the number and nothing else"
        elif metric and not trial.metrics(trial.round):
            why = f"the script printed no number that matches '{metric.pattern}' (--metric)"
        elif gone := [*overwritten(before, trial.stamps), *(each.name for each in before.keys() - trial.stamps.keys())]:
            why = f"the script changed {gone[0]}, which existed before: name the folder it saves to (--checkpoints)"
        if why:
            raise CannotError(why)

    def takes_s(self, names: Sequence[str]) -> float:
        """Returns about how long some of `cases` take, once the undisturbed run is over."""
        usual = self.usual
        steps_s = (usual.last - usual.first + 1) * usual.step_s
        notices = 0 if self._asks else len(self._notices.keys() & {*names})
        waiting_s = notices * min(NOTICE_S, steps_s)
        return len(names) * (EACH_S + STARTS * usual.start_s + SHARE * steps_s) + waiting_s

    def run(self, name: str) -> CaseVerdict:
        """Runs one of `cases`."""
        try:
            return self.cases[name]()
        except AstrayError as error:
            return CaseVerdict(False, str(error))
        finally:
            self._clear()

    def _trial(self, nodes: int | None = None, *more: str, is_in_place: bool = False) -> Trial:
        """Begins a run.  Without recovery in place, it tests the script's checkpoints."""
        self._number += 1
        more = more if is_in_place else (*more, "--recovery=restart")
        folder = self._files.apart / f"{self._number:02}"
        trial = Trial(self._script, self._files, self._metric, folder, nodes, *more)
        trial.watch = self._watch
        return trial

    def _clear(self) -> None:
        self._files.put_away(self._files.apart / f"{self._number:02}" / "files")

    # The cases.

    def _killed(self) -> CaseVerdict:
        with self._trial() as trial:
            self._reach(trial)
            trial.kill(max(each.rank for each in trial.team))
            self._between = self.usual.judge(trial, trial.round, to_end=True, spare=0)
            return self._between

    def _killed_twice(self) -> CaseVerdict:
        with self._trial() as trial:
            round_ = self._reach(trial)
            trial.kill(0)
            if trial.wait(lambda: trial.round > round_, self.usual.until(self.usual.middle)):
                trial.kill(0)
            return self.usual.judge(trial, round_ + 1, spare=0)

    def _killed_writing(self) -> CaseVerdict:
        if not self.usual.checkpoints:
            return CaseVerdict(None, "it saves no files here (--checkpoints DIR)")
        with self._trial() as trial:
            self._reach(trial, self.usual.first)
            usual = set().union(*trial.opened().values())
            round_ = self._reach(trial, self.usual.second_save - 1)
            caught = trial.catch_writer(usual, self.usual.until(self.usual.last))
            if not caught:
                return CaseVerdict(None, "no save took long enough to be caught")
            verdict = self.usual.judge(trial, round_, to_end=True)
        names = ", ".join(sorted(path.name for path in caught)[:2])
        verdict = verdict._replace(text=f"{verdict.text} ({names} was half written)")
        went_on = self._between.passed or (verdict.resumed_at is None and self._between.resumed_at is not None)
        if verdict.passed is False and went_on and verdict.numbers != "other":  # and that is what it does not do now
            return verdict._replace(advice=WHOLE, checkpoint="half-written")
        return verdict

    def _noticed(self, *, is_early: bool) -> CaseVerdict:
        """Sends a notice to the last node, which leaves; the others continue, or the same command is run again."""
        with self._trial() as trial:
            if is_early:
                trial.wait(lambda: bool(trial.team), SLACK_S)
            else:
                self._reach(trial)
            round_, asks, began, agent = trial.round, trial.asks, time.monotonic(), trial.agents[-1]
            agent.send_signal(signal.SIGUSR1)
            trial.wait(lambda: agent.poll() is not None, NOTICE_S + SLACK_S)
            is_late = time.monotonic() - began > NOTICE_S - MARGIN_S  # it was stopped, then
            at_end = CaseVerdict(None, f"it finished within {NOTICE_S} s")
            if agent.poll() == 0:
                return at_end
            if agent.poll() != EXIT_TRY_AGAIN:
                return CaseVerdict(False, f"it did not exit within {NOTICE_S} s: {trial.why_it_stands()}", NOTICE)
            if self._script.nodes_at_first > self._script.nodes[0]:
                verdict = self.usual.judge(trial, round_, same_size=False)
            else:
                trial.wait_end(SLACK_S)
                trial.end()
                with self._trial() as again:
                    verdict = self.usual.judge(again, 0, before=trial, to_end=not is_early)
        if verdict.passed is None:
            return at_end  # nothing was left to do
        if is_early:
            return verdict
        if not asks:
            return verdict._replace(text=f"no rank called notice.due(); {verdict.text}")
        if verdict.lost > 0 or is_late:
            late = f"not all ranks had saved {MARGIN_S:g} s before the deadline; " if is_late else ""
            return verdict._replace(passed=False, text=f"{late}{verdict.text}", advice=verdict.advice or NOTICE)
        return verdict._replace(text=f"saved; {verdict.text}")

    def _sized(self, many: int, is_at_once: bool) -> CaseVerdict:
        """With another number of nodes, or of workers of the only one: at once, or when it is started again."""
        several, devices = self._script.is_several, len(self._script.gpus)
        if 0 < devices < many * (self._script.workers if several else 1):
            return CaseVerdict(None, f"this host has {devices} GPUs")
        with self._trial() as trial:
            round_ = self._reach(trial)
            if is_at_once:
                if many > len(trial.agents):
                    trial.add_node()
                else:
                    trial.agents[-1].kill()
                verdict = self.usual.judge(trial, round_, same_size=False)
        if not is_at_once:
            option = "--nnodes" if several else "--nproc-per-node"
            with self._trial(many if several else None, option, str(many)) as again:
                verdict = self.usual.judge(again, 0, before=trial, same_size=False)
        is_size = verdict.passed is False and verdict.advice != RESUME
        return verdict._replace(text=f"with {many}: {verdict.text}", advice=WORLD if is_size else verdict.advice)

    def _frozen(self) -> CaseVerdict:
        with self._trial() as trial:
            round_, several = self._reach(trial), self._script.is_several
            node = len(trial.agents) - 1
            frozen = [each for each in trial.team if each.node == node and (several or each.rank == 0)]
            for signum in (signal.SIGSTOP, signal.SIGCONT):
                if several:
                    trial.agents[node].send_signal(signum)
                trial.signal(signum, frozen)
                if signum == signal.SIGSTOP:
                    trial.wait(lambda: False, FROZEN_S)
            # Its own steps, if it prints them: others may have continued without it.
            own = {(round_, each.rank) for each in frozen} & trial.newest.keys() or {*trial.newest}
            goal = min(max(trial.newest[of].number for of in own) + AFTER, self.usual.last)

            def is_past() -> bool:
                return trial.round > round_ or any(trial.newest[of].number >= goal for of in own)

            if not trial.wait(is_past, self.usual.until(goal)) or (trial.round > round_ and not several):
                return CaseVerdict(False, f"it did not continue: {trial.why_it_stands()}", PAUSE)
            if trial.round > round_:
                return self.usual.judge(trial, round_, same_size=False)
            return CaseVerdict(True, "it continued")

    # What they have in common.

    def _reach(self, trial: Trial, step: int | None = None) -> int:
        """Waits for a step, by default that of the fault, and returns the round that makes it.

        Raises:
            AstrayError: the run did not reach it as the undisturbed run did.
        """
        goal = self.usual.middle if step is None else step
        is_there = trial.wait(lambda: trial.last() >= goal, self.usual.until(goal))
        began = next((f"began at step {each.number}" for each in trial.first.values()), "had no step to make")
        if trial.agents[0].poll() == 0 if not trial.first else began != f"began at step {self.usual.first}":
            raise AstrayError(f"the script {began}: name the folder it saves to with --checkpoints DIR")
        if not is_there:
            raise AstrayError(f"the run did not reach step {goal}: {trial.why_it_stands()}")
        trial.wait(lambda: trial.least() >= goal, 1.0 + self.usual.step_s)  # a rank that is behind may be saving
        return trial.round
