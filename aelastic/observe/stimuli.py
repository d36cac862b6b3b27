"""What set off each run event: a worker's end, the end of a round, a request.

Every event that follows has the same **stimulus**, a short name, until something else sets off more: a restart with all
that it takes, from the worker's end to the workers of the next round, on every node.  No message carries it.  It is
made of what each node knows: the round, and the cause that the leader has decided about.
"""

from __future__ import annotations

from aelastic.observe import run_events as ev
from aelastic.rdzv.decisions.cause import Cause, CauseKind

START = "start"


def stimulus_of(round_: int, cause: Cause) -> str:
    """Returns the stimulus of a round's end, for example `3-failure-5`: rank 5 failed in round 3."""
    who = cause.ranks if cause.is_failure else cause.hosts
    return "-".join([str(round_), cause.kind, *map(str, who)])


class Stimuli:
    """The stimuli of one run, as its events come."""

    def __init__(self) -> None:
        self._now = START
        self._round = 0
        self._is_decided = False  # what follows from the end of this round

    def of(self, event: ev.RunEvent) -> str:
        """Returns what set off the next event; empty if nothing did, as for a step of training."""
        match event:
            case ev.RoundFormed(round_):
                self._round, self._is_decided = round_, False
            case ev.WorkerEnded(outcome="failed", rank=rank) | ev.Noticed(is_stopped=True, rank=rank):
                return self._on_failure(rank)
            case ev.Restarting(decision=decision) | ev.JobEnded(decision=decision):
                self._decide(stimulus_of(self._round, decision.cause))
            case ev.StopAsked(signum):
                self._decide(f"{self._round}-signal-{signum}")
            case ev.RendezvousLost():
                self._decide(f"{self._round}-rendezvous_lost")
            case ev.Announced(verb=verb) if not self._is_decided:
                return f"{self._round}-{verb}"
            case ev.Noticed(by=by, rank=rank):
                return f"{self._round}-{by}-{rank}"
            case ev.EndpointChanged(endpoint):
                return f"endpoint-{endpoint}"
            case ev.Progressed():
                return ""
            case _:
                pass
        return self._now

    def _on_failure(self, rank: int) -> str:
        """A worker's own end is a stimulus, until it is known what follows from the round's end."""
        if self._is_decided:
            return self._now
        own = stimulus_of(self._round, Cause(CauseKind.FAILURE, ranks=(rank,)))
        if not self._now.startswith(f"{self._round}-{CauseKind.FAILURE}"):
            self._now = own  # its first: the agent stops the others because of it
        return own

    def _decide(self, stimulus: str) -> None:
        self._now, self._is_decided = stimulus, True
