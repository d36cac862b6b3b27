"""A leader keeps its rules whatever happens, in whatever order."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from kit.effort import examples
from kit.stories.leader_terms import FAILURE, LEASE_S, RENEWED, Term, hello, node, reclaimed

from aelastic.rdzv.coordinator import session_events as ev
from aelastic.rdzv.coordinator.verdict import PUBLISH_TIMEOUT_S
from aelastic.rdzv.protocol import messages as m
from aelastic.rdzv.protocol.codec import encode, from_text

NAMES = "abc"


@st.composite
def random_events(draw: st.DrawFn) -> Any:
    name = draw(st.sampled_from(NAMES))
    conn = draw(st.integers(1, 8))
    rank = draw(st.sampled_from([None, None, 0, 1]))
    round_ = draw(st.integers(0, 3))
    standing = draw(st.sampled_from(m.Standing))
    past = (
        m.Past(m.Standing.READY)
        if round_ == 0
        else m.Past(
            standing, round_, draw(st.integers(0, 2)), draw(st.integers(0, 2)), draw(st.integers(1, 3)),
            draw(st.integers(-1, 2)), FAILURE if standing is m.Standing.FAILED else None,
        )
    )  # fmt: skip
    greeting = hello(name, rank, past=past, seen_epoch=draw(st.sampled_from([0, 0, 0, 4, 5, 9])))
    return draw(
        st.sampled_from(
            [
                "come", "come", "come", "deadline", "deadline", "deadline", "deadline", "wait", "sleep",
                ev.Received(conn, m.Alive()),
                ev.Received(conn, greeting),
                ev.Received(conn, m.Ready(node(name, rank))),
                ev.Received(conn, m.Failed(name, round_, FAILURE)),
                ev.Received(conn, m.Succeeded(name, round_)),
                ev.Received(conn, m.Prepared(name, m.Starts.WARM)),
                ev.Received(conn, m.Left(name, "x")),
                ev.Garbled(conn, "x", False),
                ev.Closed(conn), ev.Closed(conn),
                RENEWED, RENEWED, RENEWED, ev.RenewFailed("x"),
                reclaimed(draw(st.integers(10, 12))),
                ev.Published(True), ev.PublishFailed(),
                draw(st.sampled_from([RENEWED, ev.Renewed(None), ev.Published(False), ev.Reclaimed(None), ev.Resigned(), ev.RenewFailed("x")])),
            ]
        ).map(lambda event: (event, greeting, name))
    )  # fmt: skip


class Witness:
    """Looks at what a leader does, with books of its own."""

    def __init__(self, term: Term) -> None:
        self.term = term
        self.open: set[int] = set()
        self.welcomed: set[int] = set()
        self.has_stepped_down = False
        self.verdict, self.publish_by = "", float("inf")
        self.owed: list[str] = []  # answers that the board owes

    def tell(self, event: ev.Event) -> None:
        match event:
            case ev.Opened(conn) if not self.has_stepped_down:
                self.open.add(conn)
            case ev.Closed(conn):
                self.open.discard(conn)
                self.welcomed.discard(conn)
        actions = self.term.tell(event)
        assert not (self.has_stepped_down and actions), "nothing after the end"
        for index, action in enumerate(actions):
            self.look_at(action)
            if isinstance(action, ev.StepDown):
                assert index == len(actions) - 1, "nothing after the end"
        assert self.term.leader.sessions._connections.keys() == self.open

    def look_at(self, action: Any) -> None:
        match action:
            case ev.Say(conn, message):
                assert conn in self.open, "nothing is said on a connection that is gone"
                assert len(encode(message)) < 4096
                if isinstance(message, m.Welcome):
                    self.welcomed.add(conn)
                assert conn in self.welcomed or isinstance(message, m.Refused), "nothing is said before the welcome"
                if isinstance(message, m.Ended) and message.outcome is not m.Outcome.REPLACED:
                    is_asked = "publish" in self.owed and self.term.now < self.publish_by
                    assert not is_asked, "the board first"
            case ev.Drop(conn):
                assert conn in self.open, "dropped twice"
                self.open.discard(conn)
                self.welcomed.discard(conn)
            case ev.Renew():
                assert not {"keep", "reclaim"} & set(self.owed), "one question at a time"
                self.owed.append("keep")
            case ev.Reclaim():
                assert "reclaim" not in self.owed
                self.owed.append("reclaim")
            case ev.Publish(verdict):
                assert self.verdict in {"", verdict}, "one verdict"
                assert "publish" not in self.owed, "one question at a time"
                assert from_text(verdict).outcome is not m.Outcome.REPLACED
                if not self.verdict:
                    self.verdict, self.publish_by = verdict, self.term.now + PUBLISH_TIMEOUT_S
                self.owed.append("publish")
            case ev.StepDown():
                self.has_stepped_down = True

    def answer(self, event: ev.Event) -> None:
        """The board answers what it was asked, and nothing else."""
        questions: dict[type, str] = {
            ev.Renewed: "keep", ev.RenewFailed: "keep", ev.Reclaimed: "reclaim",
            ev.Published: "publish", ev.PublishFailed: "publish",
        }  # fmt: skip
        name = questions.get(type(event))
        if name is None:
            self.tell(event)
        elif name in self.owed and not (name == "reclaim" and "keep" in self.owed):  # one after the other
            self.owed.remove(name)
            self.tell(event)

    def pass_deadline(self) -> None:
        leader, term = self.term.leader, self.term
        if leader.deadline is None:
            return
        term.now = max(term.now, leader.deadline)
        self.tell(ev.DeadlinePassed())
        assert leader.has_stepped_down or leader.deadline > term.now, "what is due is done at once"


@settings(max_examples=examples(400), deadline=None)
@given(
    st.lists(random_events(), max_size=60),
    st.booleans(),
    st.floats(0.05, 30.0),
    st.integers(0, 2),
)
def test_whatever_happens_a_leader_keeps_its_rules(
    events: list[Any], is_fixed: bool, timeout_s: float, max_restarts: int
) -> None:
    term = Term(
        (1, 3), has_fixed_ranks=is_fixed, max_restarts=max_restarts,
        last_call_timeout_s=timeout_s, join_timeout_s=timeout_s, takeover_timeout_s=LEASE_S,
    )  # fmt: skip
    term.leader.is_replaceable = not is_fixed
    witness = Witness(term)
    for event, words, name in events:
        greeting = words.replace(terms=term.terms)
        match event:
            case "come":
                term.last_conn += 1
                term.conns[name] = term.last_conn
                witness.tell(ev.Opened(term.last_conn, "10.0.0.1", "10.0.0.2"))
                witness.tell(ev.Received(term.last_conn, greeting))
            case "deadline":
                witness.pass_deadline()
            case "wait":
                term.now += 0.1
            case "sleep":
                term.now += 100.0
            case ev.Garbled(conn) | ev.Closed(conn) if conn not in witness.open:
                pass
            case ev.Received(conn) if conn not in witness.open:
                witness.tell(event)
            case ev.Received(conn, m.Hello()):
                witness.tell(ev.Received(conn, greeting))
            case _:
                witness.answer(event)
