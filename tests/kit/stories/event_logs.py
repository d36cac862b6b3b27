"""Event logs for tests of what reads them: a few nodes' stories, told by the same scribe as an agent's.

Times are seconds since the story began.  Each node has clocks of its own, which may be ahead.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from aelastic.errors import ProcessFailure
from aelastic.observe.event_log import Records
from aelastic.observe.run_events import (
    Changed,
    PhaseName,
    PhaseTook,
    RestartCause,
    Restarting,
    RoundFormed,
    RunBegan,
    RunEnded,
    RunEvent,
    StartKind,
    StartPhase,
    WorkerEnded,
    WorkerReached,
    WorkersStarted,
)
from aelastic.observe.stimuli import Stimuli
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.decisions.decision import Decision
from aelastic.workers.states import Phase, WorkerState
from kit import decided

_BEGAN = 1_770_000_000  # seconds since 1970
_STATES = {
    Phase.SPAWNING: WorkerState.HEALTHY,
    Phase.RUNNING: WorkerState.HEALTHY,
    Phase.BARRIER: WorkerState.SUCCEEDED,
}


class NodeLog:
    """What the agent of one node tells.

    Args:
        host: its machine.
        workers: how many it has.
        begins: when it starts.
        ahead: how far its wall clock is ahead of the others'.
        pid: its own.
    """

    def __init__(
        self,
        host: str,
        *,
        workers: int = 2,
        begins: float = 0.0,
        ahead: float = 0.0,
        pid: int = 77,
        run_id: str = "job",
    ) -> None:
        self.host, self.workers, self.lines = host, workers, list[bytes]()
        self._ahead, self._boot = ahead, 1000.0 + 10 * len(host) + ahead  # monotonic clocks have nothing in common
        self._records, self._stimuli = Records(), Stimuli()
        self._phase, self._since, self._generation, self._first_rank = Phase.INIT, begins, 0, 0
        self.add(
            begins,
            RunBegan(
                run_id=run_id, node_id=f"{host}-{pid}", host=host, pid=pid, role="trainer", entrypoint="train.py",
                local_world_size=workers, min_nodes=1, max_nodes=4, max_restarts=3, rdzv_backend="c10d",
            ),
        )  # fmt: skip
        self.change(begins, Phase.JOINING)

    def add(self, at: float, event: RunEvent) -> None:
        event = event.caused_by(self._stimuli.of(event))
        wall = datetime.fromtimestamp(_BEGAN + at + self._ahead, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self.lines.append(json.dumps(self._records.record(event, wall, self._boot + at)).encode() + b"\n")

    def alive(self, at: float) -> None:
        """Nothing happened for a while."""
        wall = datetime.fromtimestamp(_BEGAN + at + self._ahead, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        self.lines.append(json.dumps(self._records.alive(wall, self._boot + at)).encode() + b"\n")

    def change(self, at: float, phase: Phase, reason: str = "") -> None:
        self.add(at, Changed(self._phase, phase, _STATES.get(phase, WorkerState.STOPPED), reason))
        self._phase = phase

    def took(self, at: float, name: PhaseName) -> None:
        self.add(at, PhaseTook(name, at - self._since))
        self._since = at

    def formed(self, at: float, number: int, group_rank: int, nodes: int = 2, restarts: int = 0) -> None:
        """A round is complete."""
        self._generation += 1
        self._first_rank = group_rank * self.workers
        self.add(
            at,
            RoundFormed(
                round=number, generation=self._generation, restart_count=restarts, group_rank=group_rank,
                group_world_size=nodes, first_rank=self._first_rank, local_world_size=self.workers,
                world_size=nodes * self.workers,
            ),
        )  # fmt: skip
        self.took(at, "rendezvous")
        self.change(at, Phase.SPAWNING)

    def started(self, at: float, *, is_warm: bool = False) -> None:
        ids = {local_rank: 1000 * self._generation + local_rank for local_rank in range(self.workers)}
        self.add(at, WorkersStarted(self._generation, ids, frozenset(ids) if is_warm else frozenset()))
        self.took(at, "spawn")
        self.change(at, Phase.RUNNING)

    def reached(self, at: float, local_rank: int, phase: StartPhase, duration_s: float, kind: StartKind) -> None:
        rank = self._first_rank + local_rank
        self.add(at, WorkerReached(self._generation, local_rank, rank, kind, phase, duration_s))

    def fails(self, at: float, local_rank: int, message: str, *, known_at: float) -> None:
        """A worker is gone; that ends the run of the others."""
        rank = self._first_rank + local_rank
        report = ProcessFailure.from_elsewhere(
            host=self.host, rank=rank, local_rank=local_rank, pid=1000 * self._generation + local_rank, exitcode=1,
            message=message, traceback=f"Traceback\n{message}", timestamp=int(_BEGAN + at),
        )  # fmt: skip
        self.add(known_at, WorkerEnded(self._generation, local_rank, rank, "failed", report))
        self.add(known_at, PhaseTook("detect", known_at - at, local_rank))
        self.took(known_at, "run")
        self.change(known_at, Phase.STOPPING, message)

    def restarting(self, at: float, decision: Decision, cause: RestartCause = "failure", restarts: int = 1) -> None:
        """All workers start again."""
        self.add(at, Restarting(cause, decision, restarts))
        reason = wording.text_of(decision)
        if self._phase is Phase.RUNNING:
            self.took(at, "run")
            self.change(at, Phase.STOPPING, reason)
        elif self._phase is Phase.AWAITING:
            self.took(at, "await")
            self.change(at, Phase.JOINING, reason)

    def stopped(self, at: float, *local_ranks: int, then: Phase = Phase.JOINING) -> None:
        """Those that lived are gone."""
        for local_rank in local_ranks:
            rank = self._first_rank + local_rank
            self.add(at, WorkerEnded(self._generation, local_rank, rank, "stopped"))
        self.took(at, "stop")
        self.change(at, then)

    def succeeds(self, at: float, *, ends: float) -> None:
        """All workers succeed, and later those of all other nodes have."""
        for local_rank in range(self.workers):
            rank = self._first_rank + local_rank
            self.add(at, WorkerEnded(self._generation, local_rank, rank, "succeeded"))
        self.took(at, "run")
        self.change(at, Phase.BARRIER)
        self.took(ends, "barrier")
        self.change(ends, Phase.DONE)
        self.add(ends, RunEnded(WorkerState.SUCCEEDED, "every worker succeeded"))

    def write(self, folder: Path) -> Path:
        """The log as the agent leaves it."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "events.jsonl"
        path.write_bytes(b"".join(self.lines))
        return path


def a_crash(message: str = "RuntimeError: loss is NaN", *, ahead: float = 0.0) -> tuple[NodeLog, NodeLog]:
    """Two nodes with two workers; rank 2, on node-b, crashes at 10 s, and all of them run again at 10.3 s.

    Args:
        message: of the crash.
        ahead: how far the clock of node-b is.
    """
    a, b = NodeLog("node-a"), NodeLog("node-b", ahead=ahead)
    for group_rank, node in enumerate((a, b)):
        node.formed(1.0, 1, group_rank)
        node.started(1.2)
    b.fails(10.0, 0, message, known_at=10.01)
    a.restarting(10.02, decided.restart(1, 3, decided.failed(2, "node-b")))
    a.stopped(10.10, 0, 1)
    b.stopped(10.11, 1, then=Phase.AWAITING)
    b.restarting(10.12, decided.restart(1, 3, decided.failed(2, "node-b")))
    for group_rank, (node, started) in enumerate(((a, 10.25), (b, 10.30))):
        node.formed(10.20, 2, group_rank, restarts=1)
        node.started(started)
    a.succeeds(20.0, ends=20.2)
    b.succeeds(20.1, ends=20.2)
    return a, b


def a_start(host: str = "node-a") -> NodeLog:
    """A node on its own, whose log ends when its workers had started, at 23 ms."""
    a = NodeLog(host)
    a.formed(0.01, 1, 0, nodes=1)
    a.started(0.023)
    return a


def a_node_lost() -> tuple[NodeLog, NodeLog, NodeLog]:
    """node-b is gone without a word, at 5 s at the latest; node-c comes at 6 s and is taken in."""
    a, b, c = NodeLog("node-a"), NodeLog("node-b"), NodeLog("node-c", begins=6.0)
    for group_rank, node in enumerate((a, b)):
        node.formed(1.0, 1, group_rank)
        node.started(1.1)
    a.restarting(5.0, decided.lost("node-b", "silent for 5 s"), "membership", 0)
    a.stopped(5.1, 0, 1)
    a.formed(5.2, 2, 0, nodes=1)
    a.started(5.3)
    a.restarting(6.1, decided.joined("node-c"), "membership", 0)
    a.stopped(6.2, 0, 1)
    for group_rank, node in enumerate((a, c)):
        node.formed(6.3, 3, group_rank)
        node.started(6.4)
        node.succeeds(9.0, ends=9.1)
    return a, b, c
