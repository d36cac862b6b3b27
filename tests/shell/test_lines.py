"""Several connections to one store: a question with a late answer is repeated on another one."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from kit.waiting import DEADLINE_S, wait_for

from aelastic.workers.tcpstore import lines
from aelastic.workers.tcpstore.lines import Lines

MOST = 3


class Stand:
    """A store: the test decides when it answers on each connection."""

    def __init__(self) -> None:
        self.connections = list[Connection]()
        self.tried = 0
        self.refused: float = 0  # number of connections to refuse

    def connect(self) -> Connection:
        self.tried += 1
        if self.refused:
            self.refused -= 1
            raise RuntimeError("timed out")
        self.connections.append(Connection())
        return self.connections[-1]


class Connection:
    def __init__(self) -> None:
        self.asked = list[str]()
        self.answers: SimpleQueue[str | RuntimeError] = SimpleQueue()

    def ask(self, question: str) -> str:
        self.asked.append(question)
        answer = self.answers.get(timeout=DEADLINE_S)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer


@pytest.fixture
def stand() -> Stand:
    return Stand()


@pytest.fixture
def line(stand: Stand) -> Iterator[Lines]:
    line = Lines(stand.connect, MOST)
    yield line
    line.close()
    for connection in stand.connections:
        connection.answers.put("the test is over")


def test_one_connection_is_enough_while_answers_come_in_time(
    stand: Stand, line: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LATE_S", DEADLINE_S)
    for answer in ("one", "two"):
        stand.connections[0].answers.put(answer)
        assert line.ask(lambda store: store.ask("what?")) == answer
    assert len(stand.connections) == 1


def test_the_first_answer_counts_and_a_connection_is_used_again_once_it_has_answered(stand: Stand, line: Lines) -> None:
    answers = SimpleQueue[str]()
    asking = threading.Thread(target=lambda: answers.put(line.ask(lambda store: store.ask("what?"))))
    asking.start()
    wait_for("all connections", lambda: len(stand.connections) == MOST)
    stand.connections[2].answers.put("this")
    assert answers.get(timeout=DEADLINE_S) == "this"
    asking.join()
    stand.connections[0].answers.put("that, too late")
    stand.connections[0].answers.put("this as well")
    stand.connections[1].answers.put("that, too late")
    stand.connections[1].answers.put("this as well")
    stand.connections[2].answers.put("this as well")
    assert line.ask(lambda store: store.ask("and now?")) == "this as well"
    assert len(stand.connections) == MOST


def test_a_question_that_was_answered_on_one_connection_is_not_asked_on_another_later(
    stand: Stand, line: Lines
) -> None:
    """It waits for a busy connection."""
    stand.refused = math.inf
    answers = SimpleQueue[str]()
    asking = threading.Thread(target=lambda: answers.put(line.ask(lambda store: store.ask("first"))))
    asking.start()
    wait_for("more connections are tried", lambda: stand.tried > 1)
    stand.connections[0].answers.put("one")
    assert answers.get(timeout=DEADLINE_S) == "one"
    asking.join()
    stand.connections[0].answers.put("two")
    assert line.ask(lambda store: store.ask("second")) == "two"
    assert stand.connections[0].asked == ["first", "second"]


def test_a_connection_that_is_lost_is_reported_and_one_that_cannot_be_opened_is_not(
    stand: Stand, line: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LATE_S", 0.01)
    stand.refused = 2
    stand.connections[0].answers.put(RuntimeError("reset"))
    with pytest.raises(RuntimeError, match="reset"):
        line.ask(lambda store: store.ask("what?"))
    asking = threading.Thread(target=lambda: line.ask(lambda store: store.ask("what?")))
    asking.start()
    wait_for("a connection at the second attempt", lambda: len(stand.connections) > 1)
    assert not stand.refused
    stand.connections[0].answers.put("one")
    asking.join(DEADLINE_S)
    assert not asking.is_alive()


def test_its_threads_end_with_it(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LATE_S", DEADLINE_S)
    before = set(threading.enumerate())
    line = Lines(stand.connect, MOST)
    (thread,) = set(threading.enumerate()) - before
    stand.connections[0].answers.put("one")
    line.ask(lambda store: store.ask("what?"))
    assert thread.is_alive()
    line.close()
    wait_for("it has ended", lambda: not thread.is_alive())
