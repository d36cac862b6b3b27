"""Event loops that aelastic makes: how they report exceptions outside of tasks, and what can be cancelled in them."""

from __future__ import annotations

import asyncio
import logging
import os
import re

import anyio
import pytest

from aelastic.base.loop.factory import LOOPS, loop_factory
from aelastic.base.loop.reports import DESCRIBED_MAX, WARN_INTERVAL_S, ExceptionsOnce, RareWarnings, described
from aelastic.base.loop.sockets import wait_readable


@pytest.mark.parametrize("name", LOOPS)
def test_a_callback_that_fails_again_and_again_is_shown_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for _ in range(3):
            asyncio.get_running_loop().call_soon(int, "x")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with asyncio.Runner(loop_factory=loop_factory(name)) as runner:
        runner.run(main())
    assert [record.name for record in caplog.records] == ["asyncio"]
    assert caplog.records[0].exc_info is not None and caplog.records[0].exc_info[0] is ValueError


def test_the_next_line_counts_those_that_were_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    class Loop:
        now = 0.0

        def time(self) -> float:
            return self.now

        def default_exception_handler(self, context: dict[str, str]) -> None:
            logging.getLogger("asyncio").error(context["message"])

    loop, handler = Loop(), ExceptionsOnce()
    for loop.now in (0.0, 1.0, 2.0, WARN_INTERVAL_S):
        handler(loop, {"message": f"failed at {loop.now:g}"})  # type: ignore[arg-type]
    assert [record.getMessage() for record in caplog.records] == [
        "failed at 0",
        f"failed at {WARN_INTERVAL_S:g}",
        "2 more exceptions of this event loop were not logged since the last one",
    ]


def test_what_others_do_is_reported_once_a_minute_with_its_number(caplog: pytest.LogCaptureFixture) -> None:
    warnings = RareWarnings(logging.getLogger("aelastic"))
    for second in range(0, 130, 10):
        warnings.warn("rejected %s", "x", now=float(second))
        if second == 30:
            warnings.warn("refused %s", "y", now=float(second))
    assert caplog.messages == [
        "rejected x",
        "refused y",
        "rejected x (and 5 more since the last such line)",
        "rejected x (and 5 more since the last such line)",
    ]
    assert WARN_INTERVAL_S == 60


def test_an_unexpected_exception_is_described_in_one_line_with_its_place() -> None:
    with pytest.raises(IndexError) as caught:
        list[int]().pop()
    group = ExceptionGroup("of a task group", [caught.value])
    assert re.fullmatch(r"IndexError: pop from empty list \(test_loops\.py:\d+\)", described(group))
    text = described(ValueError("no\nnumber" + "!" * 1000))
    assert text.startswith("ValueError: no number!!!") and len(text) < DESCRIBED_MAX + 30


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("name", LOOPS)
def test_a_task_that_always_finds_something_to_read_can_be_cancelled(name: str, turns: int) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"x")

    async def read_on() -> None:
        for _ in range(1000):
            await wait_readable(reader)
        pytest.fail("the cancellation does not come")

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read_on)
            for _ in range(turns):
                await asyncio.sleep(0)
            tasks.cancel_scope.cancel()

    with asyncio.Runner(loop_factory=loop_factory(name)) as runner:
        runner.run(main())
    os.close(reader)
    os.close(writer)
