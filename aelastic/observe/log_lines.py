"""The agent's own log lines: an observer that logs what a user wants to know while a run goes on."""

from __future__ import annotations

import logging

from aelastic.group.events import signal_words
from aelastic.group.phases import Phase
from aelastic.observe import run_events as ev
from aelastic.observe.observer import Observer
from aelastic.rdzv.policy.restart_policy import OFF, otherwise
from aelastic.rdzv.protocol.messages import Outcome

_log = logging.getLogger(__name__)

# What restarts without imports would have saved is worth a line from here on.
SAVED_MIN_S = 5.0
# Workers run, or begin to.
_WITH_WORKERS = {Phase.SPAWNING, Phase.RUNNING, Phase.CANCELLING, Phase.STOPPING}


class LogLines(Observer):
    """Log lines of one run.

    Args:
        shutdown_timeout_s: how long workers have to end when they are asked to.
    """

    def __init__(self, shutdown_timeout_s: float) -> None:
        self._shutdown_timeout_s = shutdown_timeout_s
        self._is_stop_asked = self._is_killing = False
        self._began_s: dict[int, float] = {}  # by generation after the first: until its cold workers had begun
        # Of this generation.
        self._has_failed = False
        self._compared = ""

    def tell(self, event: ev.RunEvent, now: float) -> None:  # noqa: ARG002, C901, PLR0912, PLR0915  one case for each
        runs = self.run_state.phase in _WITH_WORKERS
        match event:
            case ev.Waited(text) | ev.Announced("held", text):
                _log.warning("%s", text)
            case ev.RoundFormed(round_):
                self._has_failed, self._is_killing, self._compared = False, False, ""
                place = event.group_rank, event.group_world_size, event.world_size
                _log.info("round %d: group rank %d of %d, world size %d", round_, *place)
            case ev.Noticed():
                host = "" if self.run_state.began is None else self.run_state.began.host
                is_stopped = " is stopped" if event.is_stopped else ""
                _log.warning("rank %d on %s%s: %s", event.rank, host, is_stopped, event.reason)
                self._has_failed |= event.is_stopped
            case ev.Compared(_, text) if text != self._compared:  # each node that finds a hang has it looked into
                self._compared = text
                _log.warning("%s", text)
            case ev.Announced("saving", text):
                _log.warning("%s: %s", text, event.where)
            case ev.Announced("refused" | "called off" as what, text):
                _log.warning("notice %s: %s", what, text or "workers go on")
            case ev.Announced("leaving", text):
                _log.info("leaving: %s", text)
            case ev.WorkerEnded(failure=failure) if failure is not None:
                self._has_failed = True
                if not failure.found_by:  # else it was said when it was noticed
                    _log.warning("rank %d failed on %s: %s", failure.rank, failure.host, failure.short_message)
            case ev.Restarting("membership", reason):  # also where the other nodes of a job are stopped one by one
                _log.warning("stopping workers for the next round: %s", reason)
            case ev.Restarting(_, reason):
                _log.warning("restarting worker group: %s", reason)
            case ev.Killed(_, _, reason, is_early):
                self._is_killing = True
                if is_early:
                    _log.warning("%s: killed", reason)
            case ev.StopAsked(signum):
                self._on_stop_asked(signum)
            case ev.RendezvousLost(reason):
                if runs:  # else the error that ends the run comes at once, and says it
                    _log.warning("stopping workers: %s", reason)
            case ev.WorkerReached(generation, _, _, "cold", _, duration_s) if generation > 1:
                self._began_s[generation] = max(self._began_s.get(generation, 0.0), duration_s)
            case ev.JobEnded(Outcome.FAILED, reason) if runs and not self._has_failed:
                _log.warning("the job has failed: %s", reason)  # elsewhere; the report comes once our workers end
            case ev.JobEnded(Outcome.FAILED, reason) if not reason.endswith(OFF):
                changed = f" (changed by {text})" if (text := otherwise(reason)) else ""
                _log.warning("not restarted: %s%s", reason, changed)
            case ev.JobEnded(outcome, reason):
                _log.info("the job has %s: %s", outcome, reason)
            case ev.RunEnded() if (spent_s := sum(self._began_s.values())) >= SAVED_MIN_S:
                count = len(self._began_s)
                times = f"{count} restart{'s' * (count > 1)} took {spent_s:.0f} s until workers had begun"
                _log.warning("%s, with imports: --preload auto starts them with these done", times)
            case _:
                pass  # said by others: durations in the event log, the end in the report

    def _on_stop_asked(self, signum: int) -> None:
        if self.run_state.phase not in _WITH_WORKERS:
            return  # nothing runs: the agent leaves at once
        name = signal_words(signum)
        if self._is_stop_asked and self.run_state.phase in {Phase.SPAWNING, Phase.CANCELLING}:
            _log.warning("second %s: leaving; the start of workers does not end", name)
        elif self._is_stop_asked:
            _log.warning("second %s: killing workers", name)
        elif self._is_killing:
            _log.warning("%s: workers are being killed already", name)
        else:
            limit_s = self._shutdown_timeout_s
            _log.warning("%s: stopping workers (up to %g s); send it again to kill them", name, limit_s)
        self._is_stop_asked = True
