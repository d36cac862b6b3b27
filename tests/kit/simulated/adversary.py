"""An adversary that complements the seeds: faults at any step of a simulated job, chosen by looking ahead.

A run can be repeated any number of times: a copy of it meets a fault, continues, and reports the outcome.

- `attack` is one run: at a few moments it tries several faults, each in a copy that runs ahead for a while, and mostly
  picks the one that makes nodes disagree most.  Then all faults stop, as after a seed, and the job has to agree and end.
- `everywhere` tries each of several faults at each step of a job that begins, and lets each copy run to its end.

A run that fails prints the smallest part of its path that also fails, for
`PYTHONPATH=tests python -m kit.simulated.adversary --replay PATH` to replay, and the events that its leader received, as
a story for `tests/core/stories`.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

from kit.simulated.checks import DeadVotersError, ForgottenError
from kit.simulated.endpoint import ENDPOINT
from kit.simulated.simulation import Faults, Simulation, Size
from kit.simulated.supervisor import Agent
from kit.simulated.world import FIN, RST
from kit.stories.of_a_run import story_of

Kind: TypeAlias = Literal[
    "cut", "cut one way", "isolate", "reset", "break", "freeze", "suspend", "crash", "crash RST", "dark", "leave",
    "fail", "endpoint down",
]  # fmt: skip
KINDS: tuple[Kind, ...] = get_args(Kind)
WHILES_S = (0.3, 0.5, 2.0, 7.0, 12.0)
AHEAD_S = (0.3, 1.0, 3.0, 6.5)
CANDIDATES = 6
BEST_SHARE = 0.8  # how often the worst fault is picked, rather than any of them
AFTERMATH_S = 10.0  # between the last fault and the moment when all faults stop
BEGIN_S = 4.0
OVER = (ForgottenError, DeadVotersError)  # these end a run without a broken promise
ENDS_WITH = {"crash": FIN, "crash RST": RST, "dark": "dark"}


@dataclass(frozen=True)
class Fault:
    """One fault."""

    kind: Kind
    host: str
    other: str = ""  # the other end of what is cut or reset; with `isolate`, whether the endpoint is also cut off
    seconds: float = 0.0  # until it is over or the host returns; 0: never

    def apply(self, job: Simulation) -> None:
        agent = job.on(self.host)
        agent = None if agent is None or agent.is_frozen else agent
        match self.kind:
            case "cut":
                job._cut([(self.host, self.other), (self.other, self.host)], self.seconds)
            case "cut one way":
                job._cut([(self.host, self.other)], self.seconds)
            case "isolate":
                others = [host for host in [*job.hosts, self.other] if host and host != self.host]
                job._cut([way for host in others for way in ((self.host, host), (host, self.host))], self.seconds)
            case "reset":
                job._reject(self.host, self.other, self.seconds)
            case "endpoint down":
                job.take_endpoint_down(self.seconds)
            case _ if agent is not None:
                self._happen_to(agent, job)
            case _:
                pass  # there is nobody

    def _happen_to(self, agent: Agent, job: Simulation) -> None:
        if self.kind == "break":
            job._break(agent)
        elif self.kind == "fail":
            if agent.alive and agent.has_spawned:
                agent.fail_now()
        elif self.kind == "freeze":
            job.freeze(agent, self.seconds)
        elif self.kind == "suspend":
            job.suspend(agent, self.seconds)
        else:
            if self.kind == "leave":
                agent.ask_to_leave()
            else:
                agent.crash(ENDS_WITH[self.kind])
                job.gone(agent.host)
            if self.seconds:
                job.restart_after(self.seconds, agent.host)


@dataclass(frozen=True)
class Path:
    """A job and its faults: everything needed to repeat a run."""

    seed: int
    size: Size
    faults: tuple[tuple[float, Fault], ...] = ()  # and when

    def run(self) -> None:
        """Runs it.

        Raises:
            AssertionError: a promise was broken.
        """
        with closing(begin(self)) as job, suppress(*OVER):
            self._strike(job)
            end(job)

    def played(self) -> Simulation:
        """The job after the last of its faults."""
        job = begin(self)
        self._strike(job)
        return job

    def _strike(self, job: Simulation) -> None:
        for at, fault in self.faults:
            job.world.run(lambda: False, at)
            fault.apply(job)

    def unrest_after(self, ahead_s: float) -> float:
        """How much nodes disagree this long after the last fault; infinite if a promise breaks."""
        with closing(begin(self)) as job:
            try:
                self._strike(job)
                job.world.run(lambda: False, job.world.now + ahead_s)
                return unrest(job)
            except OVER:
                return 0.0
            except Exception:  # noqa: BLE001  whatever it is, it was found
                return float("inf")

    def with_(self, at: float, fault: Fault) -> Path:
        return replace(self, faults=(*self.faults, (at, fault)))

    def shrunk(self) -> Path:
        """The smallest part of it that still fails."""
        best = self
        for at in reversed(range(len(self.faults))):
            fewer = replace(best, faults=best.faults[:at] + best.faults[at + 1 :])
            best = fewer if fewer.fails() else best
        for at, (when, fault) in enumerate(best.faults):  # the shortest of each
            for seconds in sorted(each for each in WHILES_S if each < fault.seconds):
                faults = [*best.faults]
                faults[at] = when, replace(fault, seconds=seconds)
                if (shorter := replace(best, faults=tuple(faults))).fails():
                    best = shorter
                    break
        return best

    @property
    def story(self) -> str:
        """The story of its last leader, in the notation of the core's tests."""
        return story_of(self.run, f"a run of the adversary, seed {self.seed}")

    def fails(self) -> str:
        """What broke; empty if nothing did."""
        try:
            self.run()
        except Exception as error:  # noqa: BLE001  whatever it is, it was found
            return f"{type(error).__name__}: {error}"
        return ""

    def __str__(self) -> str:
        lines = [f"{at:9.4f}  {fault.kind} {fault.host} {fault.other} {fault.seconds:g} s" for at, fault in self.faults]
        described = {
            "seed": self.seed,
            "size": asdict(self.size),
            "faults": [[at, asdict(each)] for at, each in self.faults],
        }
        return "\n".join(
            [*lines, f"replay: PYTHONPATH=tests python -m kit.simulated.adversary --replay '{json.dumps(described)}'"]
        )


def begin(path: Path) -> Simulation:
    """A job whose nodes start one after the other, and in which nothing goes wrong by itself."""
    job = Simulation(path.seed, path.size, Faults())
    job.watch_ends()
    job.watch_rounds()
    job.is_calm = True  # workers neither fail nor end by themselves
    for number, host in enumerate(job.hosts):
        job.world.at(0.3 * number, lambda host=host: job.restart(host))  # type: ignore[misc]
    return job


def end(job: Simulation) -> None:
    """Waits for the effects of the last fault; then all faults stop, and the job has to agree and end."""
    job.world.run(lambda: False, job.world.now + AFTERMATH_S)
    job.calm_down()
    job.agree()
    job.finish()


def unrest(job: Simulation) -> float:
    """How far nodes are from one round, one leader and one verdict."""
    living = job.living
    rounds = {job.checks.round_of(agent) for agent in living if agent.alive}
    leaders = sum(agent.coordinates for agent in living)
    restarts = {round_.common[0] for round_ in rounds if round_ is not None}
    half_known = bool(job.checks.verdicts) and bool(living)
    return 3.0 * max(len(rounds) - 1, 0) + 2.0 * max(leaders - 1, 0) + max(len(restarts) - 1, 0) + 2.0 * half_known


def size_of(dice: random.Random, kind: str) -> Size:
    nodes = dice.choice((2, 3, 3, 4))
    least = dice.randint(1, nodes)
    return Size(
        nodes=max(nodes, 3) if kind == "three endpoints" else nodes,
        min_nodes=least,
        max_nodes=max(nodes, least),
        max_restarts=dice.choice((0, 1, 3)),
        has_etcd=kind == "etcd",
        is_endpoint_on_node0=kind == "node0",
        endpoints=3 if kind == "three endpoints" else 1,
    )


ENDPOINTS = ("c10d", "etcd", "node0", "three endpoints")


def any_fault(dice: random.Random, hosts: Sequence[str]) -> Fault:
    kind = dice.choice(KINDS)
    host, other = dice.sample([*hosts], 2)
    if kind in {"cut", "cut one way"} and dice.random() < 0.3:
        host, other = dice.choice([(host, ENDPOINT), (ENDPOINT, host)])
    if kind == "isolate":
        other = dice.choice(("", ENDPOINT))
    comes_again = kind not in {"crash", "crash RST", "dark", "leave"} or dice.random() < 0.7
    return Fault(kind, host, other, dice.choice(WHILES_S) if comes_again else 0.0)


def _described(path: Path) -> str:
    return f"{path.story}\n\n{path}"


def attack(seed: int, endpoint: str) -> Path:
    """Makes one run and returns its path.

    Raises:
        AssertionError: a promise was broken; the note has the path.
    """
    dice = random.Random(f"adversary {endpoint} {seed}")  # the world's own chance is not touched
    path = Path(seed, size_of(dice, endpoint))
    at = dice.uniform(0.5, BEGIN_S)
    with closing(begin(path)) as job:
        try:
            with suppress(*OVER):
                for _ in range(dice.randint(2, 4)):
                    job.world.run(lambda: False, at)
                    fault = _worst(dice, job, path, at)
                    path = path.with_(at, fault)
                    fault.apply(job)
                    at += dice.choice((0.005, 0.05, 0.3, 2.0, 6.0)) * dice.uniform(0.2, 1.5)
                    job.world.run(lambda: False, at)
                end(job)
        except Exception as error:
            error.add_note(_described(path.shrunk()))
            raise
    return path


def _worst(dice: random.Random, job: Simulation, path: Path, at: float) -> Fault:
    """Picks one of several random faults: mostly the one that makes nodes disagree most."""
    tried = [any_fault(dice, job.hosts) for _ in range(CANDIDATES)]
    ahead_s = dice.choice(AHEAD_S)
    if dice.random() >= BEST_SHARE:
        return tried[0]
    found = {fault: path.with_(at, fault).unrest_after(ahead_s) for fault in tried}
    return max(tried, key=lambda each: (found[each], dice.random()))


def everywhere(size: Size, faults: Sequence[Fault], until_s: float) -> Iterator[tuple[float, Fault, bool]]:
    """Tries each fault at each step of a job that begins; yields when, which, and whether all promises held."""
    moments = list[float]()
    with closing(begin(Path(0, size))) as job:
        while job.world.now < until_s:
            moments.append(job.world.now)
            job.world.step()
    for steps, at in enumerate(moments):
        for fault in faults:
            yield at, fault, _is_kept(size, steps, fault)


def _is_kept(size: Size, steps: int, fault: Fault) -> bool:
    with closing(begin(Path(0, size))) as job:
        for _ in range(steps):
            job.world.step()
        try:
            fault.apply(job)
            with suppress(*OVER):
                end(job)
        except Exception:  # noqa: BLE001  whatever it is, it was found
            return False
    return True


def of_two() -> list[Fault]:
    """Faults that a job of two nodes can meet."""
    ways = (("node0", "node1"), ("node1", "node0"), ("node1", ENDPOINT))
    kinds: dict[Kind, float] = {"break": 0.0, "fail": 0.0, "freeze": 7.0, "crash": 1.0, "dark": 1.0, "leave": 1.0}
    faults = [Fault(kind, host, "", seconds) for host in ("node0", "node1") for kind, seconds in kinds.items()]
    return faults + [Fault("cut one way", *way, 7.0) for way in ways]


def attacks(first: int, seconds: float, endpoints: Sequence[str] = ENDPOINTS) -> int:
    """Attacks for this many seconds, the endpoints in turn; returns the number of attacks.

    Raises:
        AssertionError: a promise was broken; the note has the path.
    """
    until, seed = time.monotonic() + seconds, first
    while time.monotonic() < until:
        for endpoint in endpoints:
            attack(seed, endpoint)
        seed += 1
    return (seed - first) * len(endpoints)


def main(described: Any) -> None:
    faults = tuple((at, Fault(**fault)) for at, fault in described["faults"])
    Path(described["seed"], Size(**described["size"]), faults).run()


if __name__ == "__main__":
    main(json.loads(sys.argv[2]))
