"""Stories of a supervisor with fake workers, as text, on a virtual clock.

A story has a title and options, then one line per generation, with what each worker does: `succeeds` or `fails`, after
10 s unless it has `at`, or `runs` until it is stopped; then what happens to the agent, by time.  Below that comes the
result: starts, signals, log lines, and how the run ends.
"""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

import anyio
import pytest

from aelastic import RunResult, Supervisor, WorkerExit, WorkerSpec
from aelastic.agent.postmortem import Postmortem
from aelastic.agent.watches.watch import Found
from aelastic.logs import run_logs
from aelastic.logs.follower import Follower
from aelastic.observe.observer import Observer
from aelastic.observe.run_events import RunEvent
from aelastic.rdzv.registry import InProcessLink
from kit.backends import FakeBackend, Plan, StoreStandIn, WatchingStandIn
from kit.stories.files import Story
from kit.virtual_clock import DiskHangs, on_virtual_time

SIGNALS = {"TERM": 15, "KILL": 9, "USR1": 10, "INT": 2}
NAMES = {number: name for name, number in SIGNALS.items()}
# What an observer receives, for the kinds in a story's `tells`.
EVENTS = {
    "RunBegan": "told that the run begins: {0.local_world_size} workers, {0.max_restarts} restarts, endpoint {0.rdzv_backend!r}",
    "RoundFormed": "told of round {0.round}, generation {0.generation}",
    "PhaseTook": "told that {0.name} took {0.duration_s:g} s",
    "Noticed": "told of {0.local_rank} by {0.by}: {0.reason}, is stopped: {0.is_stopped}",
    "WorkerEnded": "told that {0.local_rank} {0.outcome}",
    "Restarting": "told of a restart: {0.reason}",
    "StopAsked": "told of signal {0.signum}",
    "RunEnded": "told of the end: {0.state.name}: {0.reason}{cause}",
}
# Operations that a hanging disk may block.
DISKS: dict[str, tuple[Any, str]] = {
    "what workers wrote": (run_logs.RunLogs, "tail"),
    "first folders": (run_logs.RunLogs, "_make_folders"),
    "new folders": (run_logs, "lay_out"),
    "sizes": (Follower, "size"),
}


def _hang(*_: Any, **__: Any) -> Any:
    raise DiskHangs


async def _hang_alone(*_: Any) -> None:
    await anyio.sleep_forever()


def plain(text: str) -> str:
    """The text without parts that are specific to this machine."""
    return re.sub(r"(?<![\w/])/\S+[^\s:,;]", "PATH", text.replace(os.uname().nodename, "HOST"))


def work() -> None:
    """An entrypoint with a return value; it never runs here."""


PLAN = re.compile(
    r"(?P<end>succeeds|fails|runs|returns)( (?P<what>(?!at)\w+))?( at (?P<at>\S+))?(, ignores (?P<ignores>[A-Z ]+))?"
    r"(, dies (?P<late>\S+) s late)?(, leaves something for (?P<left>\S+) s)?"
)


def plan_of(text: str) -> Plan:
    found = PLAN.fullmatch(text)
    assert found, text
    fails, what = found["end"] == "fails", found["what"]
    end = WorkerExit(int(what or 3)) if fails else WorkerExit(0, what)
    at = float(found["at"] or (1e6 if found["end"] == "runs" else 10))
    ignored = frozenset(SIGNALS[name] for name in (found["ignores"] or "").split())
    return Plan(at, end, ignored, float(found["late"] or 0), float(found["left"] or 0))


class Play(Observer):
    """One story: what happens to its agent, and the result."""

    def __init__(self, story: Story, patch: pytest.MonkeyPatch) -> None:
        options = dict(word.split("=") for word in story.rules.split())
        self.lines: list[str] = []
        self.watching: list[WatchingStandIn] = []
        self.look_s = float(options.pop("look_s", 0))
        self.kinds = ["Noticed", *options.pop("tells", "").split(",")]
        self.backend = FakeBackend(
            *(
                [plan_of(each) for each in line[9:].split(" | ")]
                for line in story.lines
                if line.startswith("workers: ")
            ),
            start_s=float(options.pop("start_s", 0)),
            shield=bool(options.pop("shield", "")),
        )
        entrypoint = work if "returns" in str(story.lines) else "train.py"
        numbers = {name: int(value) if name == "max_restarts" else float(value) for name, value in options.items()}
        usual: dict[str, Any] = {"shutdown_timeout_s": 30.0, "max_restarts": 2, **numbers}
        spec = WorkerSpec(local_world_size=len(self.backend.generations[0]), entrypoint=entrypoint, **usual)
        self.patch = patch
        self._stand_in(patch)
        self.supervisor = Supervisor(spec, backend=self.backend, observers=[self])

    def _stand_in(self, patch: pytest.MonkeyPatch) -> None:
        def watch(*arguments: Any) -> WatchingStandIn:
            self.watching.append(WatchingStandIn(arguments[-1]))
            return self.watching[-1]

        look, stop = Postmortem.of_living, self.backend.stop

        async def of_living(*arguments: Any) -> Any:
            await anyio.sleep(self.look_s)  # stacks are dumped, files are read
            return await look(*arguments)

        def note(local_rank: int, signum: int) -> bool:
            self.write(f"{NAMES.get(signum, signum)} to", local_rank)
            return stop(local_rank, signum)

        patch.setattr("aelastic.agent.resources.StoreHost", StoreStandIn)
        patch.setattr("aelastic.agent.resources.Watches", watch)
        patch.setattr(Postmortem, "of_living", of_living)
        patch.setattr(self.backend, "stop", note)
        patch.setattr(InProcessLink, "cut_short", lambda _: self.write("the wait for other agents is over"))

    def write(self, what: str, *ranks: int) -> None:
        line = f"  {anyio.current_time():g} s: {what}"
        if ranks and self.lines and self.lines[-1].startswith(f"{line} "):
            line = self.lines.pop()
        self.lines.append(f"{line}{''.join(f' {rank}' for rank in ranks)}")

    def tell(self, event: RunEvent, now: float) -> None:
        kind = type(event).__name__
        if kind == "WorkersStarted":
            env = self.backend.starts[-1][0].env
            count, most = (env[f"TORCHELASTIC_{name}"] for name in ("RESTART_COUNT", "MAX_RESTARTS"))
            self.write(f"workers run, restart {count} of {most}")
        elif kind in self.kinds:
            cause = getattr(event, "cause", None)
            because = f", cause: rank {cause.rank} with {cause.exitcode}" if cause else ""
            self.write(plain(EVENTS[kind].format(event, cause=because)))

    async def act(self, at: float, do: str, run: asyncio.Task[RunResult] | None) -> None:
        await anyio.sleep(at)
        match do.split():
            case ["stop", *number]:
                self.supervisor.stop(*map(int, number))
            case ["disk", "hangs:", *what]:
                place, name = DISKS[" ".join(what)]
                self.patch.setattr(place, name, _hang)
            case ["values", "hang"]:
                self.patch.setattr(Postmortem, "return_value", _hang_alone)
            case ["cancel"] if run is not None:
                run.cancel()
            case ["state?"]:
                self.write(f"it is {self.supervisor.state.name}")
            case ["find", *_]:
                ranks, generation, why, name = re.fullmatch(
                    r"find ([\d ]+?)(?: of generation (\d))?(?: that (\w+))?(?: for (\w+))?", do
                ).groups()  # type: ignore[union-attr]
                signum = None if name == "nothing" else SIGNALS[name or "KILL"]
                async with anyio.create_task_group() as tasks:  # all at once, as a watch does
                    for rank in map(int, ranks.split()):
                        found = Found(int(generation or 1), rank, "timer", f"{why or 'hangs'} {rank}", signum)
                        tasks.start_soon(self.watching[0].on_found, found)
            case _:
                raise AssertionError(do)

    async def play(self, story: Story) -> None:
        happens = [re.fullmatch(r"(?:(\S+) s|before): (.*)", line) for line in story.lines]
        acts = [(float(each[1] or -1), each[2]) for each in happens if each]
        for _, do in (each for each in acts if each[0] < 0):
            await self.act(0, do, None)
        run = asyncio.get_running_loop().create_task(self.supervisor.run())
        async with anyio.create_task_group() as tasks:
            for at, do in (each for each in acts if each[0] >= 0):
                tasks.start_soon(self.act, at, do, run)
            await asyncio.wait([run])
            tasks.cancel_scope.cancel()
        assert self.backend.closed_at == [anyio.current_time()]
        self.write_end(run)

    def write_end(self, run: asyncio.Task[RunResult]) -> None:
        state = self.supervisor.state.name
        if run.cancelled():
            assert not self.backend.running
            self.write(f"cancelled, it is {state}")
        elif error := run.exception():
            what, _, _ = plain(f"{type(error).__name__}: {error}").partition(". ")
            self.write(f"{what}; it is {state}")
        else:
            result = run.result()
            assert result.state is self.supervisor.state
            self.write(f"{state}: {plain(result.reason)}")
            for rank, failure in result.failures.items():
                what = f"{rank} (pid {failure.pid}) failed with {failure.exitcode}: {plain(failure.message)}"
                self.lines.append(f"    {what}")
            for rank, value in result.return_values.items():
                self.lines += [f"    {rank} returned {value}"] * (value is not None)
            self.lines += [f"    stopped: {' '.join(map(str, result.victims))}"] * bool(result.victims)


def played(story: Story) -> list[str]:
    """A story's lines with the supervisor's present results."""
    with pytest.MonkeyPatch.context() as patch:

        @on_virtual_time
        async def play() -> None:
            one = Play(story, patch)
            await one.play(story)
            lines.extend(one.lines)

        lines = [line for line in story.lines if not line.startswith("  ")]
        play()
    return lines
