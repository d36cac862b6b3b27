"""The workers in a simulation of drains: all ranks of a round take steps together, with `notice.due` after each.

A rank takes its next step once every rank of the round has taken the last one, as after an `all_reduce`.  So a rank that
saves at a step where others do not waits forever: the simulation looks for exactly that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from aelastic.agent.group import events as g
from aelastic.rdzv.protocol import requests as r
from aelastic.training.notice.page import FROZEN, NONE, SAVE
from kit.simulated.world import World

if TYPE_CHECKING:
    from kit.simulated.supervisor import Agent

SETTLE_S = 0.005
LOOK_S = 0.005


@dataclass
class Rank:
    """One worker, and its page."""

    agent: Agent
    generation: int
    step_s: float
    calls: int = 0
    saved_at: int = 0

    @property
    def lives(self) -> bool:
        return self.agent.alive == self.generation


@dataclass
class Training:
    """The workers of one round."""

    world: World
    size: int
    ranks: dict[int, Rank] = field(default_factory=dict)
    saves: dict[int, set[int]] = field(default_factory=dict)  # by call: the ranks that have saved at it

    def join(self, rank: int, of: Rank) -> None:
        self.ranks[rank] = of
        self.world.after(of.step_s, partial(self._step, rank))

    def _step(self, rank: int) -> None:
        """Takes a step if all ranks have taken the last one; otherwise waits for them."""
        mine = self.ranks[rank]
        if not mine.lives:
            return
        if len(self.ranks) < self.size or any(each.calls < mine.calls for each in self.ranks.values()):
            self.world.after(0.002, partial(self._step, rank))
            return
        mine.calls += 1
        self._decide(rank)

    def _decide(self, rank: int) -> None:
        """Calls `notice.due` and follows its result."""
        mine, node = self.ranks[rank], self.ranks[rank].agent.holds
        if not mine.lives:
            return
        if node.phase == FROZEN:
            self.world.after(0.0005, partial(self._decide, rank))
        elif node.phase == SAVE and mine.calls == node.save_at:
            self.world.after(self.world.random.uniform(0.01, 0.5), partial(self._saved, rank))
        else:
            self.world.after(mine.step_s, partial(self._step, rank))

    def _saved(self, rank: int) -> None:
        mine = self.ranks[rank]
        if mine.lives:
            mine.saved_at = mine.calls
            self.saves.setdefault(mine.calls, set()).add(rank)
            self._park(rank)

    def _park(self, rank: int) -> None:
        mine, node = self.ranks[rank], self.ranks[rank].agent.holds
        if not mine.lives:
            return
        if node.phase == FROZEN or (node.phase == SAVE and node.save_at == mine.calls):
            self.world.after(0.01, partial(self._park, rank))
        else:
            self.world.after(mine.step_s, partial(self._step, rank))


@dataclass
class Holds:
    """A node's notices, as `agent/requests/notices.py` carries them out."""

    agent: Agent
    send: Callable[[r.Request], None]
    phase: int = NONE
    save_at: int = 0
    newest: r.Notice | None = None
    asks: int = 0

    def ask(self, verb: r.Verb, deadline_s: float = 0.0, *, at_save: bool = False) -> None:
        self.asks += 1
        node_id, assigned = self.agent.node_id, self.agent.group.assigned
        round_ = 0 if assigned is None else assigned.round
        self.send(r.Ask(node_id, f"{node_id}-{self.asks}", verb, "", deadline_s, "spot", round_, at_save))

    def begin(self) -> None:
        """New workers have new pages."""
        self.phase, self.save_at = NONE, 0

    def on_notice(self, notice: r.Notice) -> None:
        is_older = self.newest is not None and notice.notice_id < self.newest.notice_id
        if is_older and notice.stage is not r.Stage.LEAVE:
            return
        self.newest, group = notice, self.agent.group
        if notice.stage is r.Stage.LEAVE:
            self.agent.leaves_in_order()
        elif group.assigned is None or group.assigned.round != notice.round:
            return
        elif notice.stage is r.Stage.FREEZE:
            save_at, self.phase = self.save_at, FROZEN
            self._later(SETTLE_S, notice, partial(self._send_frozen, notice, save_at))
        elif notice.stage is r.Stage.SAVE:
            self.phase, self.save_at = (SAVE, notice.save_at) if notice.save_at else (NONE, 0)
            self._later(LOOK_S, notice, partial(self._look, notice))
        else:
            self.begin()
        self._later(notice.kill_s, notice, partial(self._kill, group.generation))

    def _later(self, after_s: float, notice: r.Notice, do: Callable[[], None]) -> None:
        def done() -> None:
            if self.newest is notice and self.agent.is_alive:
                do()

        self.agent.world.after(after_s, lambda: self.agent.post(object(), done))

    @property
    def _ranks(self) -> list[Rank]:
        training = self.agent.training
        return [] if training is None else [each for each in training.ranks.values() if each.agent is self.agent]

    def _send_frozen(self, notice: r.Notice, save_at: int) -> None:
        calls = [each.calls for each in self._ranks]
        pages = sum(each > 0 for each in calls)
        most, can_leave = max(calls, default=0), self.agent.can_leave_in_place
        self.send(r.Frozen(self.agent.node_id, notice.notice_id, most, pages, save_at, can_leave))

    def _look(self, notice: r.Notice) -> None:
        if any(each.lives and each.saved_at != self.save_at for each in self._ranks) or not notice.save_at:
            self._later(LOOK_S, notice, partial(self._look, notice))
        else:
            self.send(r.Saved(self.agent.node_id, notice.notice_id))

    def _kill(self, generation: int) -> None:
        if self.agent.group.generation == generation and self.agent.group.phase == "stopping":
            self.agent.post_to_group(g.GraceOver(generation, "the deadline of the notice has passed", is_final=True))
