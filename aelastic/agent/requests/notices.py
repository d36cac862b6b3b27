"""Carries out an announced interruption on this node: holds its ranks, lets them save, and leaves.

The leader decides (`rdzv/leader/drain.py`); this module carries out the newest of its notices, through the pages that
workers share with their agent.
"""

from __future__ import annotations

import os
from typing import assert_never

import anyio

from aelastic.agent.group import events as ev
from aelastic.agent.resources import DrainRequest, RunContext
from aelastic.base.host import proc_table
from aelastic.base.loop import clock
from aelastic.observe.run_events import Announced
from aelastic.rdzv.decisions import wording
from aelastic.rdzv.protocol import requests as r
from aelastic.training.notice.page import FROZEN, NONE, SAVE
from aelastic.workers.states import Phase

# By then, a write of one processor has long been visible to all others.
SETTLE_S = 0.005
LOOK_S = 0.005


class Notices:
    """Notices, and requests for them, of one node."""

    def __init__(self, context: RunContext) -> None:
        self._node_id, self._group, self._pages = context.settings.node_id, context.group, context.resources.pages
        self._send, self._post, self._emit = context.resources.link.send, context.post, context.emit
        self._newest: r.Notice | None = None
        self._following = anyio.CancelScope()
        self._changed = anyio.Event()

    def ask(self, asked: DrainRequest) -> None:
        """Requests that this node leaves, or stays after all."""
        verb = r.Verb.CANCEL if asked.deadline_s is None else r.Verb.DRAIN
        self._ask(verb, asked.reason, asked.deadline_s or 0.0)

    def _ask(self, verb: r.Verb, reason: str, deadline_s: float = 0.0) -> None:
        ask_id = f"{self._node_id}-{os.urandom(4).hex()}"
        self._send(r.Ask(self._node_id, ask_id, verb, "", deadline_s, reason[: r.REASON_MAX]))

    def on_received(self, message: r.Notice | r.Answer) -> None:
        """Handles an announced or cancelled interruption, or the result of a request."""
        newest_id = 0 if self._newest is None else self._newest.notice_id
        match message:
            case r.Answer(_, is_applied, text) if text:
                self._emit(Announced("answer" if is_applied else "refused", text))
            case r.Notice(notice_id, _, stage) if stage is r.Stage.LEAVE or notice_id >= newest_id:
                self._newest = message
                self._following.cancel()
                self._changed.set()
            case r.Notice() | r.Answer():
                pass  # a notice of an earlier leader; an answer to a query
            case _:
                assert_never(message)

    async def run(self) -> None:
        """Carries out the newest notice.  Runs until cancelled."""
        while True:
            await self._changed.wait()
            self._changed = anyio.Event()
            notice = self._newest
            assert notice is not None
            with anyio.CancelScope() as self._following:
                await self._follow(notice, clock.now() + notice.kill_s)

    async def _follow(self, notice: r.Notice, kill_at: float) -> None:
        pages = self._pages
        if notice.stage is r.Stage.LEAVE:
            self._post(ev.StopRequested(reason=_words(notice), is_drained=True))
            return await self._kill_late(kill_at)
        while self._round <= notice.round and not self._is_in(notice.round):
            if clock.now() >= kill_at:
                return None
            await anyio.sleep(LOOK_S)  # this node has yet to begin the round
        if self._round != notice.round:
            return None  # the round is over
        match notice.stage:
            case r.Stage.FREEZE:
                save_at = pages.save_at
                pages.set_phase(FROZEN, kill_at=kill_at)
                calls = await self._settled()
                most = max(calls.values(), default=0)
                can_leave = self._group.in_place.can_leave
                self._send(r.Frozen(self._node_id, notice.notice_id, most, len(calls), save_at, can_leave))
                await anyio.sleep_until(kill_at)  # no leader has sent more: the round has ended, or will
                return pages.set_phase(NONE)
            case r.Stage.SAVE:
                pages.set_phase(SAVE if notice.save_at else NONE, notice.save_at, kill_at)
                self._emit(Announced("saving", _words(notice), notice.save_at, notice.is_signalled, notice.verb.value))
                return await self._await_saves(notice, kill_at)
            case r.Stage.NONE:
                self._emit(Announced("called off", _words(notice)))
                if self._group.exits.is_draining:
                    self._ask(r.Verb.RESTART, "workers ended for a notice that was canceled")
                return pages.set_phase(NONE)
            case _:
                assert_never(notice.stage)

    @property
    def _round(self) -> int:
        return 0 if self._group.assigned is None else self._group.assigned.round

    def _is_in(self, round_: int) -> bool:
        """Returns whether the workers of that round have started, and the pages are theirs."""
        is_its = self._round == round_ and self._pages.generation == self._group.generation
        return is_its and self._group.phase is not Phase.SPAWNING

    async def _settled(self) -> dict[int, int]:
        """Returns how far the ranks are, once this no longer changes: none continues past its next call."""
        before, calls = None, dict(self._pages.calls())
        while calls != before:
            await anyio.sleep(SETTLE_S)
            before, calls = calls, dict(self._pages.calls())
        return calls

    async def _await_saves(self, notice: r.Notice, kill_at: float) -> None:
        generation = self._group.generation
        if notice.is_signalled:
            signum = self._group.spec.drain_signal
            ranks = tuple(each.local_rank for each in self._group.workers if proc_table.handles(each.id, signum))
            if ranks:
                self._post(ev.Drained(generation, ranks, kill_at))
        with anyio.CancelScope(deadline=kill_at):
            while self._group.exits.alive - self._pages.saved():  # noqa: ASYNC110  shared memory
                await anyio.sleep(LOOK_S)
            while self._group.phase is Phase.RUNNING and not self._group.exits.alive:  # noqa: ASYNC110
                await anyio.sleep(LOOK_S)  # all have ended by themselves: that is reported first
        if clock.now() < kill_at:
            self._send(r.Saved(self._node_id, notice.notice_id))
        await self._kill_late(kill_at)

    async def _kill_late(self, kill_at: float) -> None:
        """Kills workers that have not ended by then, on all nodes at once."""
        generation = self._group.generation
        await anyio.sleep_until(kill_at)
        if self._group.generation == generation and self._group.phase is Phase.STOPPING:
            self._post(ev.GraceOver(generation, "the deadline of the notice has passed", is_final=True))


def _words(notice: r.Notice) -> str:
    return "" if notice.cause is None else wording.text_of(notice.cause)
