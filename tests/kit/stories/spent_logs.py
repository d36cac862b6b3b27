"""Event logs of jobs whose time is known: the use of each second is decided first, then logged."""

from __future__ import annotations

import random
from collections.abc import Iterator

from aelastic.observe.run_events import Announced, Noticed, Progressed, RunEnded, Waited, WorkerEnded
from aelastic.observe.time_spent import ON
from aelastic.rdzv.decisions.decision import Decision
from aelastic.workers.states import Phase, WorkerState
from kit import decided
from kit.stories.event_logs import NodeLog

# The interval of progress records; a living agent is never silent for longer.
EACH_S = 60.0


class Job:
    """A job of several nodes, generated from a seed.

    `truth` is how its time was spent, in seconds; `again` is how many steps were made twice.
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.truth = dict.fromkeys(ON, 0.0)
        self.now, self.round, self.step, self.high, self.again = 0.0, 0, 0, 0, 0
        self.logs: list[NodeLog] = []
        self.nodes: list[NodeLog] = []
        self.count = self.rng.choice([1, 1, 2, 3])
        self.ahead = [0.0, *(self.rng.uniform(-40, 40) for _ in range(self.count - 1))]
        self.launch()
        for _ in range(self.rng.randint(1, 8)):
            self.start()
            self.train()
            self.rng.choice([self.fail, self.hang, self.drain, self.vanish])()
        self.start()
        self.train()
        self.end()

    def goes(self, on: str, seconds: float) -> float:
        """Spends time; returns the time at its end."""
        self.truth[on] += seconds
        self.now += seconds
        return self.now

    def each(self) -> Iterator[tuple[int, NodeLog]]:
        yield from enumerate(self.nodes)

    def launch(self) -> None:
        self.nodes = [
            NodeLog(f"node-{place}", begins=self.now, ahead=self.ahead[place], pid=77 + self.round, run_id="job")
            for place in range(self.count)
        ]
        self.logs += self.nodes
        self.on = "starting"

    def start(self) -> None:
        """Nodes meet; workers import, and make the first step that is not saved."""
        if self.rng.random() < 0.3:
            for _ in range(self.rng.randint(2, 20)):
                self.goes("waiting", 10.0)
                for _, node in self.each():
                    node.add(self.now, Waited("1 of 2 nodes"))
            self.on = "starting"
        else:
            self.goes(self.on, self.rng.uniform(0.1, 3.0))
        self.round += 1
        for rank, node in self.each():
            node.formed(self.now, self.round, rank, nodes=self.count, restarts=self.round - 1)
            node.started(self.now)
        self.goes(self.on, imports_s := self.rng.uniform(2.0, 50.0))
        for _, node in self.each():
            node.reached(self.now, 0, "process_group", imports_s, "cold")
        self.goes(self.on, self.rng.uniform(1.0, 50.0))
        self.step = self.rng.randint(self.step // 2, self.step) + 1
        self.add_step()

    def add_step(self) -> None:
        for _, node in self.each():
            node.add(self.now, Progressed(self.round, 0, 0, self.step, steps_per_s=1 / 0.7))

    def train(self) -> None:
        step_s = self.rng.uniform(0.05, 2.0)
        left = int(self.rng.uniform(100.0, 6000.0) / step_s)
        while left:
            steps = min(left, max(1, int(EACH_S / step_s)))
            again = min(max(self.high - self.step, 0), steps)
            self.goes("twice", again * step_s)
            self.goes("trained", (steps - again) * step_s)
            self.again += again
            self.step, left = self.step + steps, left - steps
            self.add_step()
        self.high = max(self.high, self.step)

    def stop(self, decision: Decision, cause: str = "failure") -> None:
        for _, node in self.each():
            node.restarting(self.now, decision, cause, self.round)  # type: ignore[arg-type]
            node.stopped(self.now, 0, 1)
            node.add(self.now, Progressed(self.round, 0, 0, self.step, is_last=True))

    def fail(self) -> None:
        self.nodes[0].add(self.now, WorkerEnded(self.round, 0, 0, "failed"))
        self.on = "starting"
        self.goes("starting", self.rng.uniform(0.01, 5.0))
        self.stop(decided.restart(1, 9, decided.failed(0, "node-0")))

    def hang(self) -> None:
        silent_s = float(self.rng.randint(30, 1800))
        for _ in range(int(silent_s // 60)):
            self.goes("hung", 60.0)
            for _, node in self.each():
                node.alive(self.now)
        self.goes("hung", silent_s % 60)
        self.nodes[0].add(
            self.now,
            Noticed(self.round, 0, 0, "hang", f"no output for {silent_s:g} s", is_stopped=True, silent_s=silent_s),
        )
        self.fail()

    def drain(self) -> None:
        for _, node in self.each():
            node.add(self.now, Announced("saving", "node-0 leaves", 7))
        self.goes("drained", self.rng.uniform(1.0, 30.0))
        self.on = "drained"
        self.stop(decided.left("node-0", "spot"), "membership")

    def vanish(self) -> None:
        """All machines vanish at once, and the same command is run again."""
        self.goes("unknown", self.rng.uniform(100.0, 5000.0))
        self.round = 0
        self.launch()

    def end(self) -> None:
        self.goes("waiting", 0.0)
        for _, node in self.each():
            for local_rank in range(node.workers):
                node.add(self.now, WorkerEnded(self.round, local_rank, 0, "succeeded"))
        self.goes("waiting", self.rng.uniform(0.0, 20.0))
        for _, node in self.each():
            node.change(self.now, Phase.DONE)
            node.add(self.now, RunEnded(WorkerState.SUCCEEDED, ""))
