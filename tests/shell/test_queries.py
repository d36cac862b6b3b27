"""What nodes show each other, over a connection that carries messages in their wire format."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from anyio.abc import TaskGroup
from kit.virtual_clock import on_virtual_time

from aelastic.agent.requests.queries import ANSWER_S, COMING_S, Queries
from aelastic.base.host.process_states import ProcessStates
from aelastic.observe.run_events import RoundFormed, StacksTaken
from aelastic.observe.run_state import RunState
from aelastic.rdzv.protocol import requests as r
from aelastic.rdzv.protocol.codec import TEXT_MAX, UPWARD, Decoder, encode

ROUND = RoundFormed(
    round=1,
    generation=1,
    restart_count=0,
    group_rank=0,
    group_world_size=2,
    first_rank=0,
    local_world_size=1,
    world_size=2,
)


class Line:
    """A coordinator that passes a node's questions back to that node."""

    def __init__(self, tasks: TaskGroup, folder: Path) -> None:
        self._tasks = tasks
        self.is_cut_after = -1  # number of messages of an answer
        self.other_is_back_at = math.inf  # another node of the round, n2
        self.logs = SimpleNamespace(file_of=lambda rank, is_stderr: folder / f"{rank}-{is_stderr}")
        link = SimpleNamespace(send=self.send, coordinates=True)
        progress = SimpleNamespace(look_now=anyio.lowlevel.checkpoint)
        resources = SimpleNamespace(link=link, logs=self.logs, progress=progress, process_states=ProcessStates())
        settings = SimpleNamespace(node_id="n1", is_local=True, spec=SimpleNamespace(rdzv=None))
        self.state = RunState()
        self.queries = Queries(cast(Any, settings), cast(Any, resources), self.state, self.collect_stacks)

    async def collect_stacks(self, why: str) -> StacksTaken:
        return StacksTaken(1, why, {}, "")

    def send(self, message: Any) -> None:
        (decoded,) = Decoder(UPWARD).feed(encode(message))
        match decoded:
            case r.Fetch():
                is_back = anyio.current_time() >= self.other_is_back_at
                self.queries.on_received(r.Answer(decoded.ask_id, True, "", ("n1", "n2") if is_back else ("n1",)))
                self._tasks.start_soon(self.queries.show, decoded)
                if is_back:
                    self.queries.on_received(r.Fetched("n2", "n1", decoded.ask_id, "", "{}", is_last=False))
                    self.queries.on_received(r.Fetched("n2", "n1", decoded.ask_id, "", ""))
            case r.Fetched() if self.is_cut_after:
                self.is_cut_after -= 1
                self.queries.on_received(decoded)
            case _:
                pass  # lost


@pytest.mark.parametrize("size", [0, 1, TEXT_MAX, TEXT_MAX + 1, 10 * TEXT_MAX])
@on_virtual_time
async def test_a_status_of_any_length_arrives_whole(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = {"workers": "é\0" * (size // 2)}
    monkeypatch.setattr(Queries, "status", lambda _: status)
    async with anyio.create_task_group() as tasks:
        shown = await Line(tasks, tmp_path).queries.fetch(r.What.STATUS)
        assert [json.loads(text) for text in shown.found.values()] == [status] and not shown.silent


@on_virtual_time
async def test_an_answer_that_was_cut_is_requested_again_and_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status = {"workers": "x" * 3 * TEXT_MAX}
    monkeypatch.setattr(Queries, "status", lambda _: status)
    async with anyio.create_task_group() as tasks:
        line = Line(tasks, tmp_path)
        line.is_cut_after = 2

        async def heal() -> None:
            await anyio.sleep(ANSWER_S / 2)
            line.is_cut_after = -1

        tasks.start_soon(heal)
        shown = await line.queries.fetch(r.What.STATUS)
        assert [json.loads(text) for text in shown.found.values()] == [status] and not shown.silent
        line.is_cut_after = 2
        shown = await line.queries.fetch(r.What.STATUS)
        assert shown.silent == ("n1",)


@on_virtual_time
async def test_a_round_whose_nodes_have_yet_to_find_their_coordinator_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Queries, "status", lambda _: {})
    async with anyio.create_task_group() as tasks:
        line = Line(tasks, tmp_path)
        line.state.formed = ROUND
        line.other_is_back_at = anyio.current_time() + COMING_S / 2
        shown = await line.queries.fetch(r.What.STATUS)
        assert {node_id for node_id, _ in shown.found} == {"n1", "n2"}


@on_virtual_time
async def test_a_node_that_is_lost_is_not_waited_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queries, "status", lambda _: {})
    async with anyio.create_task_group() as tasks:
        line = Line(tasks, tmp_path)
        line.state.formed = ROUND
        began = anyio.current_time()
        shown = await line.queries.fetch(r.What.STATUS)
        assert {node_id for node_id, _ in shown.found} == {"n1"}
        assert anyio.current_time() - began < ANSWER_S


@on_virtual_time
async def test_a_node_that_fails_to_answer_reports_it_and_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Queries) -> Any:
        raise ZeroDivisionError("nobody expected this")

    monkeypatch.setattr(Queries, "status", fail)
    async with anyio.create_task_group() as tasks:
        shown = await Line(tasks, tmp_path).queries.fetch(r.What.STATUS)
    assert "this node failed to answer: ZeroDivisionError: nobody expected this" in shown.refused["n1"]
