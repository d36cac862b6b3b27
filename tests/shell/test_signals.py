"""Signals of this process while a job runs in it, and afterwards."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator

import pytest

from aelastic.cli.process import handle_signals

HANDLED = signal.SIGINT, signal.SIGTERM
handler_of = signal.getsignal


@pytest.fixture
def _c_code_handles_them(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Handlers of a library that was loaded before Python started: Python can neither name nor restore them."""
    before = {signum: handler_of(signum) for signum in HANDLED}
    monkeypatch.setattr(signal, "getsignal", lambda signum: None)
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("_c_code_handles_them")
async def test_a_command_takes_over_the_signals_that_c_code_handles() -> None:
    loop, received = asyncio.get_running_loop(), asyncio.Event()
    with handle_signals(loop, dict.fromkeys(HANDLED, received.set), is_last=True):
        signal.raise_signal(signal.SIGTERM)
        await received.wait()
    assert handler_of(signal.SIGTERM) is signal.SIG_IGN
    assert handler_of(signal.SIGINT) is not signal.SIG_IGN  # a person at the terminal wants something


@pytest.mark.usefixtures("_c_code_handles_them")
async def test_a_program_that_lives_on_keeps_the_signals_that_c_code_handles() -> None:
    before = {signum: handler_of(signum) for signum in HANDLED}
    with handle_signals(asyncio.get_running_loop(), dict.fromkeys(HANDLED, lambda: None), is_last=False):
        assert {signum: handler_of(signum) for signum in HANDLED} == before
    assert {signum: handler_of(signum) for signum in HANDLED} == before
