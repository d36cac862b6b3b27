"""Which of a rank's errors are consequences of another rank's end, and which are the script's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from aelastic.training.consequence import is_consequence
from aelastic.training.link import Link, RoundOver


class Agent:
    """The parts of an agent that a link uses."""

    def __init__(self, *, ends_the_round: bool = True, is_cut: bool = False) -> None:
        self._ends_the_round = ends_the_round
        self.sockets = SimpleNamespace(was_cut_by_peer=lambda: is_cut)
        self.waited_s: list[float | None] = []

    def wait_for_over(self, _: int, timeout_s: float | None) -> bool:
        self.waited_s.append(timeout_s)
        return self._ends_the_round


def judged(raises: Any, agent: Agent, patience_s: float = 20.0) -> bool:
    try:
        raises()
    except BaseException as error:  # noqa: BLE001  any kind
        return is_consequence(error, cast("Link", agent), 3, patience_s)
    raise AssertionError("nothing was raised")


def raise_(error: BaseException, cause: BaseException | None = None) -> None:
    raise error from cause


def in_c() -> None:
    """Fails like a collective with a lost peer."""
    torch.zeros(2, 3) @ torch.zeros(2, 3)


def wrapped() -> None:
    try:
        in_c()
    except RuntimeError as error:
        raise KeyError("a framework's own error") from error


def in_context() -> None:
    try:
        in_c()
    except RuntimeError:
        raise ValueError("while handling it")  # noqa: B904  intended


def in_python_of_torch() -> None:
    exec(compile("raise RuntimeError('a peer is lost')", "/site-packages/torch/distributed/x.py", "exec"), {})


@pytest.mark.parametrize("raises", [in_c, wrapped, in_context, in_python_of_torch])
def test_an_error_of_a_collective_is_a_consequence_if_the_agent_ends_the_round(raises: Any) -> None:
    assert judged(raises, Agent())
    assert not judged(raises, Agent(ends_the_round=False))


def test_the_end_of_the_round_is_one_at_once() -> None:
    agent = Agent()
    assert judged(lambda: raise_(RoundOver()), agent)
    assert agent.waited_s == []


OWN = {
    "raised by the script": lambda: raise_(RuntimeError("a mistake")),
    "of another kind": lambda: {"a": 1}["missing"],
    "an interrupt": lambda: raise_(KeyboardInterrupt()),
    "an exit": lambda: raise_(SystemExit(3)),
    "no memory": lambda: raise_(torch.OutOfMemoryError("no memory")),
}


@pytest.mark.parametrize("raises", OWN.values(), ids=OWN)
def test_an_error_of_the_script_is_its_own_and_nobody_is_waited_for(raises: Any) -> None:
    agent = Agent()
    assert not judged(raises, agent)
    assert agent.waited_s == []


def test_a_lack_of_memory_is_a_ranks_own_even_if_a_collective_has_failed() -> None:
    def raises() -> None:
        try:
            in_c()
        except RuntimeError as error:
            raise torch.OutOfMemoryError("no memory") from error

    assert not judged(raises, Agent())


def test_an_agent_whose_message_is_late_has_not_ended_the_round() -> None:
    agent = Agent(ends_the_round=False)
    assert not judged(in_c, agent)
    assert agent.waited_s == [0.2]


def test_the_agent_has_longer_where_a_socket_of_the_round_is_closed(capsys: pytest.CaptureFixture[str]) -> None:
    agent = Agent(ends_the_round=False, is_cut=True)
    assert not judged(in_c, agent, 20.0)
    assert agent.waited_s == [3.0, 20.0]
    assert capsys.readouterr().err == (
        "aelastic: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3); another rank has closed a "
        "connection, so this rank waits to hear whether the round is over\n"
    )


def test_a_rank_that_gets_its_answer_soon_logs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert judged(in_c, Agent(is_cut=True))
    assert capsys.readouterr().err == ""


def test_errors_that_cause_each_other_are_looked_at_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert not judged(lambda: raise_(one, other), Agent())
