"""How a node handles notices, with stand-ins for its group and its coordinator."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import pytest
from kit import decided
from kit.virtual_clock import on_virtual_time

from aelastic.agent.channels import NoticePages
from aelastic.agent.group import events as ev
from aelastic.agent.group.in_place import InPlace
from aelastic.agent.group.phases import Exits
from aelastic.agent.requests import notice_sources
from aelastic.agent.requests.notice_sources import DEADLINE_S, NoticeSources
from aelastic.agent.requests.notices import Notices
from aelastic.agent.resources import DrainRequest
from aelastic.rdzv.protocol import requests as r
from aelastic.spec import WorkerSpec
from aelastic.training.notice.page import CALLS, FROZEN, NONE, SAVE, SAVED_AT, attach
from aelastic.workers.states import Phase

CAUSE = decided.drain("n1", 60.0, "")


class Node:
    """A worker of the second generation, in round 2, and its agent's messages."""

    def __init__(self, folder: Path) -> None:
        self.group = group = cast(
            Any,
            SimpleNamespace(
                generation=2,
                assigned=SimpleNamespace(round=2),
                phase=Phase.RUNNING,
                exits=Exits(alive={0}, left={0}),
                in_place=InPlace(),
                workers=(),
                spec=SimpleNamespace(drain_signal=15),
            ),
        )
        self.pages = NoticePages(folder)
        self.sent: list[Any] = []
        self.posted: list[ev.Event] = []
        self.events: list[Any] = []
        resources = SimpleNamespace(pages=self.pages, link=SimpleNamespace(send=self.sent.append))
        context = SimpleNamespace(settings=SimpleNamespace(node_id="n1"), resources=resources, group=group)
        context.post, context.emit = self.posted.append, self.events.append
        self.notices = Notices(cast(Any, context))

    def begin(self) -> memoryview:
        words = attach(self.pages.begin(2, [0])[0])
        assert words is not None
        words[CALLS] = 7
        return words

    async def until(self, is_so: Any) -> None:
        with anyio.fail_after(10):
            while not is_so():  # noqa: ASYNC110  shared memory
                await anyio.sleep(0.001)


def notice(number: int, stage: r.Stage, save_at: int = 0, round_: int = 2, kill_s: float = 60.0) -> r.Notice:
    return r.Notice(number, round_, stage, save_at, False, kill_s, CAUSE)


def of_a_node(test: Callable[[Node], Awaitable[None]]) -> Callable[..., None]:
    """Runs a test with a node that processes notices, on a virtual clock."""

    async def run(tmp_path: Path) -> None:
        node = Node(tmp_path)
        task = asyncio.create_task(node.notices.run())
        try:
            await test(node)
        finally:
            task.cancel()
            node.pages.close()

    run.__name__ = test.__name__
    return on_virtual_time(run)


@of_a_node
async def test_ranks_are_held_and_counted_then_they_save_and_the_node_reports_it(node: Node) -> None:
    words = node.begin()
    node.notices.on_received(notice(5, r.Stage.FREEZE))
    await node.until(lambda: node.sent)
    assert node.sent == [r.Frozen("n1", 5, 7, 1, 0)] and node.pages.phase == FROZEN
    node.notices.on_received(notice(5, r.Stage.SAVE, 8))
    await node.until(lambda: node.pages.phase == SAVE)
    words[SAVED_AT] = 8
    await node.until(lambda: node.sent[1:])
    assert node.sent[1] == r.Saved("n1", 5) and not node.posted
    node.notices.on_received(notice(6, r.Stage.FREEZE))
    await node.until(lambda: node.sent[2:])
    assert node.sent[2] == r.Frozen("n1", 6, 7, 1, 8), "with the call at which its ranks may be parked"
    node.notices.on_received(notice(7, r.Stage.NONE))
    await node.until(lambda: node.pages.phase == NONE)


@of_a_node
async def test_a_round_whose_workers_end_for_a_notice_that_is_called_off_begins_again(node: Node) -> None:
    node.begin()
    for number, has_ended in ((5, False), (6, True)):
        node.group.exits.is_draining = has_ended
        node.notices.on_received(notice(number, r.Stage.SAVE, 8))
        await node.until(lambda: node.pages.phase == SAVE)
        node.notices.on_received(notice(number, r.Stage.NONE))
        await node.until(lambda: node.pages.phase == NONE)
    (asked,) = node.sent
    assert isinstance(asked, r.Ask) and asked.verb is r.Verb.RESTART and not asked.at_save


@of_a_node
async def test_a_notice_that_comes_before_the_workers_of_its_round_is_for_them(node: Node) -> None:
    node.group.generation, node.group.assigned.round = 1, 1
    node.pages.begin(1, [0])
    node.notices.on_received(notice(5, r.Stage.SAVE, 1))
    await anyio.sleep(2)
    assert node.pages.phase == NONE
    node.group.generation, node.group.assigned.round = 2, 2  # its workers have no pages yet
    await anyio.sleep(2)
    assert node.pages.phase == NONE
    node.group.phase, node.group.exits.alive = Phase.SPAWNING, set()
    words = node.begin()
    await anyio.sleep(2)
    assert not node.sent, "none of them has saved: they are being started"
    node.group.phase, node.group.exits.alive = Phase.RUNNING, {0}
    await node.until(lambda: (node.pages.phase, node.pages.save_at) == (SAVE, 1))
    assert not node.sent
    words[SAVED_AT] = 1
    await node.until(lambda: node.sent)
    assert node.sent == [r.Saved("n1", 5)]


@of_a_node
async def test_what_is_older_or_of_a_round_that_is_over_is_void_but_to_leave_is_not(node: Node) -> None:
    node.begin()
    node.notices.on_received(notice(5, r.Stage.FREEZE))
    await node.until(lambda: node.sent)
    node.notices.on_received(notice(4, r.Stage.NONE))
    await anyio.sleep(2)
    assert node.pages.phase == FROZEN
    node.notices.on_received(notice(6, r.Stage.NONE, round_=1))
    await anyio.sleep(2)
    assert node.pages.phase == FROZEN
    node.notices.on_received(notice(0, r.Stage.LEAVE))
    await node.until(lambda: node.posted)
    assert node.posted == [ev.StopRequested(reason="drain of n1 within 60 s", is_drained=True)]


@of_a_node
async def test_workers_that_have_not_ended_in_time_are_killed(node: Node) -> None:
    node.begin()
    node.notices.on_received(notice(5, r.Stage.SAVE, 8, kill_s=1.0))
    await anyio.sleep(2)
    assert not node.posted, "they are not being stopped"
    node.group.phase = Phase.STOPPING
    node.notices.on_received(notice(6, r.Stage.SAVE, 8, kill_s=1.0))
    await node.until(lambda: node.posted)
    assert node.posted == [ev.GraceOver(2, "the deadline of the notice has passed", is_final=True)]
    assert r.Saved("n1", 6) not in node.sent


@of_a_node
async def test_what_this_node_asks_has_an_id_of_its_own(node: Node) -> None:
    node.notices.ask(DrainRequest(60.0, "spot"))
    node.notices.ask(DrainRequest(None))
    drain, cancel = node.sent
    assert drain.ask_id != cancel.ask_id
    assert drain == r.Ask("n1", drain.ask_id, r.Verb.DRAIN, "", 60.0, "spot")
    assert cancel == r.Ask("n1", cancel.ask_id, r.Verb.CANCEL, "", 0.0, "")


def test_a_page_that_cannot_be_read_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    pages = NoticePages(tmp_path)
    pages.begin(1, [0])
    monkeypatch.setattr(os, "pread", fail)
    pages.set_phase(SAVE, 1)
    assert (pages.calls(), pages.saved(), pages.is_saving(0)) == ({}, set(), False)
    pages.close()


@of_a_node
async def test_a_worker_without_a_page_has_not_saved_before_it_ends(node: Node) -> None:
    node.pages.begin(2, [])
    node.notices.on_received(notice(5, r.Stage.FREEZE))
    await node.until(lambda: node.sent)
    assert node.sent == [r.Frozen("n1", 5, 0, 0, 0)]
    node.notices.on_received(notice(5, r.Stage.SAVE, 1))
    await anyio.sleep(2)
    assert not node.sent[1:]
    node.group.exits.alive = set()
    await anyio.sleep(2)
    assert not node.sent[1:], "it first reports that all have finished"
    node.group.phase = Phase.BARRIER
    await node.until(lambda: node.sent[1:])
    assert node.sent[1] == r.Saved("n1", 5)


# The notice file.


@on_virtual_time
async def test_a_file_that_says_nothing_or_nonsense_is_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    notices: list[DrainRequest] = []
    path = tmp_path / "notice"
    spec = WorkerSpec(entrypoint="true", notice_file=path)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(NoticeSources(spec, {}, notices.append).run)
        for text, count in (("", 1), (None, 2), ("\0gar\u00e4ge", 3), ("12 soon", 4)):
            path.unlink(missing_ok=True) if text is None else path.write_text(text)
            while len(notices) < count:  # noqa: ASYNC110  polls a file
                await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    by = "by the notice file"
    assert notices == [
        DrainRequest(DEADLINE_S, by),
        DrainRequest(None),
        DrainRequest(DEADLINE_S, by),
        DrainRequest(12.0, f"soon, {by}"),
    ]
    assert "is not a notice; draining within 30 s" in caplog.text


@on_virtual_time
async def test_a_file_that_is_being_written_is_one_notice(monkeypatch: pytest.MonkeyPatch) -> None:
    notices: list[DrainRequest] = []
    looks = [None, "", "drain 60 spot", "", "cancel"]
    monkeypatch.setattr(notice_sources, "_read", lambda path: looks.pop(0) if len(looks) > 1 else looks[0])
    monkeypatch.setattr(notice_sources, "FILE_INTERVAL_S", 0.01)

    spec = WorkerSpec(entrypoint="true", notice_file=Path("notice"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(NoticeSources(spec, {}, notices.append).run)
        while DrainRequest(None) not in notices:  # noqa: ASYNC110  as above
            await anyio.sleep(0.01)
        tasks.cancel_scope.cancel()
    assert notices == [DrainRequest(60.0, "spot, by the notice file"), DrainRequest(None)]
