"""Stories of the worker group as text: events from the agent, its workers and the leader, and its reaction.

As in `texts.py`.  A group has two workers; `where` maps each word of the first line to the story events that lead there.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

from aelastic.agent.group import events as ev
from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.machine import DeadlinePassed
from aelastic.errors import ProcessFailure
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.protocol.messages import Assigned, Ended, Interrupted, Outcome, StartAhead
from aelastic.rdzv.protocol.ranks import NodeRanks
from aelastic.spec import WorkerSpec
from aelastic.workers.states import signal_words
from kit import decided
from kit.stories import files, texts
from kit.stories.files import Story, options_of

FOLDER = files.FOLDER / "group"
SHUTDOWN_S, BARRIER_S = 30.0, 300.0
RANKS = NodeRanks(
    group_rank=1, group_world_size=3, first_rank=4, world_size=10, first_role_rank=2, role_world_size=6, local_world_size=2
)  # fmt: skip
FAILURE = ProcessFailure.from_elsewhere("host", 4, 0, 77, 1, "ValueError: batch is empty", "", 1000)
FAILURES = [FAILURE, ProcessFailure.from_elsewhere("host", 5, 1, 78, -11, "SIGSEGV", "", 1000)]
HANGS = [
    ProcessFailure.from_elsewhere("host", 4 + rank, rank, 77, -9, f"timer 'step' of rank {4 + rank} expired", "", 1000)
    for rank in (0, 1, 2)
]
VERDICTS = {
    "failed": Ended(Outcome.FAILED, decided.refused(3, decided.failed(4)), FAILURE),
    "succeeded": Ended(Outcome.SUCCEEDED, decided.SUCCEEDED),
    "timed": Ended(Outcome.TIMED_OUT, decided.TOO_FEW),
}
WHERE = {
    "init": "",
    "joining": "start",
    "spawning": "joining; round 1",
    "running": "spawning; spawned",
    "cancelling for another round": "spawning; interrupted 1",
    "cancelling for good": "spawning; stop SIGINT",
    "cancelling for the verdict": "spawning; verdict failed",
    "stopping for another round": "running; interrupted 1",
    "stopping for a failure": "running; 0 exits failed",
    "stopping for a worker that hangs": "running; 0 hangs",
    "stopping for good": "running; stop",
    "stopping for the verdict": "stopping for a failure; verdict failed",
    "awaiting": "stopping for a failure; 0 clears; 1 ends",
    "barrier": "running; 0 1 ends",
    "done": "barrier; verdict succeeded",
    "opted in": "running; 0 ready; 1 ready",
    "leaving for a failure": "opted in; 0 exits failed",
    "leaving": "opted in; interrupted 1 in-place",
    "replacing": "leaving for a failure; interrupted 1 in-place; 0 clears",
    "forming": "leaving; 0 ready after=1; 1 ready after=1",
    "leaving again": "forming; 0 exits",
    "starting ahead": "joining; start ahead; spawned",
    "ready ahead": "starting ahead; 0 ready; 1 ready",
}


def assigned(round_: int) -> Assigned:
    return Assigned(round_, 0, RANKS, "host0", 29500)


class Playing(texts.Playing):
    """A group and its clock."""

    def __init__(self, where: str) -> None:
        times: dict[str, Any] = {"shutdown_timeout_s": SHUTDOWN_S, "exit_barrier_timeout_s": BARRIER_S}
        self.core = WorkerGroup(WorkerSpec(entrypoint="train.py", local_world_size=2, **times))
        self.now = 100.0
        self.begin(where)

    def begin(self, where: str) -> None:
        before, *lines = WHERE[where].split("; ")
        if before in WHERE:
            self.begin(before)
        else:
            lines = [before] * bool(before) + lines
        for line in lines:
            self.handle(line)

    def parts(self) -> Iterator[str]:
        core, exits = self.core, self.core.exits
        yield core.phase
        yield core.state.value
        yield f"because {wording.text_of(core.reason)}" if core.reason else "for no reason"
        yield f"verdict {core.verdict.outcome}" if core.verdict else "no verdict"
        yield f"generation {core.generation}"
        yield "workers " + " ".join(f"{each.global_rank}/{each.role_rank}:{each.id}" for each in core.workers)
        for ranks, what in ((exits.alive, "live"), (exits.left, "not cleared"), (exits.stopped, "stopped")):
            yield f"{what}: " + (" ".join(map(str, sorted(ranks))) or "none")
        failed = ", ".join(f"{rank} ({each.message})" for rank, each in sorted(exits.failed.items()))
        yield f"failed: {failed or 'none'}"
        yield "victims that raised: " + " ".join(str(rank) for rank, why in exits.stopped.items() if why)
        yield f"killed {exits.kill_count} times"
        yield f"wish: {type(core._wish).__name__.lower()}"
        stages = " ".join(core.in_place.stage.values())
        is_in_place = any(each not in {"starting", "lost"} for each in core.in_place.stage.values())
        yield f"in place: {stages}" if is_in_place else "nothing in place"

    def handle(self, line: str) -> list[Any]:
        done: list[Any] = []
        for event in self.events(line):
            done += self.core.handle(event, self.now)
        return done

    def events(self, line: str) -> Iterator[ev.Event]:  # noqa: C901, PLR0912  a case for each
        options = options_of(line)
        of, restarts = int(options.get("of", 1)), int(options.get("restarts", 0))
        match line.split():
            case ["start"]:
                yield ev.Start()
            case ["start", "ahead"]:
                yield StartAhead()
            case [seconds, "s", "pass"]:
                self.now += float(seconds)
            case ["a", "timer", "fires"]:
                yield DeadlinePassed()
            case ["round", number, *_]:
                yield assigned(int(number)).replace(restart_count=restarts)
            case ["interrupted", number, *_]:
                decision = {
                    "": decided.restart(1, 3, decided.failed(9, "host3")),
                    "lost": decided.lost("host3", "silent for 5 s"),
                    "joined": decided.joined("host3"),
                    "rule": decided.restart_by_rule(),
                }[options.get("for", "")]
                yield Interrupted(int(number), decision, restarts, in_place="in-place" in line)
            case ["verdict", how, *_]:
                yield VERDICTS[how]
            case ["spawned", *ids] if any("=" not in each for each in ids):
                yield ev.Spawned(1, {int(rank): name for rank, _, name in (each.partition(":") for each in ids)})
            case ["spawned", *_]:
                yield ev.Spawned(of, {0: 600 + 100 * of, 1: 601 + 100 * of})
            case ["cancelled", *_]:
                yield ev.SpawnCancelled(of)
            case ["stop", *by] if "for" not in options:
                yield ev.StopRequested(signum(by[0]) if by else signal.SIGTERM)
            case ["stop", *_]:
                yield ev.StopRequested(reason=options["for"].replace("_", " "))
            case ["grace", "over", *_]:
                yield ev.GraceOver(of, "rank 5 does nothing")
            case ["drained", *words]:
                yield ev.Drained(of, tuple(int(each) for each in words if each.isdigit()), 120.0)
            case [rank, "exits", *how]:
                failure = FAILURES[int(rank) % 2]
                raised = failure if "raised" in how else None
                gone_at = self.now - float(options["ago"]) if "ago" in options else None
                yield ev.Exited(of, int(rank), failure if "failed" in how else None, gone_at, raised)
            case [rank, "ready", *_]:
                yield ev.Ready(of, int(rank), int(options.get("process", 0)), int(options.get("after", -1)))
            case [rank, "shares", *_]:
                of_round = int(options.get("in", 1))
                yield ev.Shared(of, int(rank), int(options.get("process", 0)), of_round, 1234, 1)
            case [rank, "has", "no", "state", *_]:
                yield ev.StateLost(of, int(rank), int(options.get("process", 0)), int(options.get("in", 1)))
            case [rank, "is", "done", *_]:
                yield ev.Done(of, int(rank), int(options.get("process", 0)), int(options.get("in", 1)))
            case [rank, "is", "replaced", *_]:
                yield ev.Replaced(of, int(rank), 900 + int(rank), has_socket="without a socket" not in line)
            case [rank, "clears", *_]:
                yield ev.Cleared(of, int(rank))
            case [rank, "hangs", *by]:
                by = [each for each in by if "=" not in each]
                yield ev.FoundUnhealthy(of, int(rank), HANGS[int(rank)], signum(by[0]) if by else signal.SIGKILL)
            case [*ranks, "ends"]:
                for each in map(int, ranks):
                    yield ev.Exited(self.core.generation, each, None)
                    yield ev.Cleared(self.core.generation, each)
            case _:
                raise AssertionError(line)

    def words(self, action: ev.Action) -> str:  # noqa: C901, PLR0912  as above
        match action:
            case ev.Join(round_, are_ready):
                assigned = 0 if self.core.assigned is None else self.core.assigned.round
                joins = "joins" if round_ == assigned else f"joins after round {round_}"
                return f"{joins}, its workers ready" if are_ready else joins
            case ev.Spawn(generation, assigned):
                return f"spawns generation {generation} " + (f"for round {assigned.round}" if assigned else "ahead")
            case ev.ReportPrepared(are_ready):
                return f"tells that its workers {'are ready' if are_ready else 'start in the round'}"
            case ev.Begin(_, local_ranks, assigned):
                return f"has {' '.join(map(str, local_ranks))} begin round {assigned.round}"
            case ev.Leave(_, local_ranks, round_):
                return f"has {' '.join(map(str, local_ranks))} leave round {round_}"
            case ev.Replace(_, local_rank, process):
                return f"replaces {local_rank} by process {process}"
            case ev.Release():
                return "lets all end"
            case ev.ReportOptedIn(round_):
                return f"tells that all have opted in to round {round_}"
            case ev.CancelSpawn(generation):
                return f"cancels the start of generation {generation}"
            case ev.ReportFailed(round_, failure, at):
                return f"tells that rank {failure.rank} failed in round {round_}, at {at:g}: {failure.message}"
            case ev.ReportSucceeded(round_):
                return f"tells that round {round_} succeeded"
            case ev.ReportLeft(reason):
                return f"tells that it leaves: {reason}"
            case ev.Stop(generation, local_ranks, by):
                return f"stops {' '.join(map(str, local_ranks))} of generation {generation} with {signal_words(by)}"
            case ev.Finish(reason):
                return f"finishes: {wording.text_of(reason)}"


def signum(name: str) -> int:
    return int(name) if name.isdigit() else signal.Signals[name]


def played(story: Story) -> list[str]:
    return list(Playing(story.rules).lines(story))
