"""A simulation run as a text story: what its last leader received, in the notation of `kit.stories.coordinator`.

Nodes are named by letters in the order in which the leader met them; hosts and times are only those of the notation.  The
core then handles each line again, so the story shows the core's own decisions and can be stored in `tests/core/stories`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from math import ceil
from string import ascii_lowercase

from aelastic.errors import ProcessFailure
from aelastic.rdzv.leader import coordinator_events as ev
from aelastic.rdzv.leader.coordinator import Coordinator
from aelastic.rdzv.leader.job_state import JobState
from aelastic.rdzv.protocol import messages as m
from kit.stories.coordinator import played
from kit.stories.files import FOLDER, Story

Received = list[tuple[float, ev.Event]]


@dataclass
class Book:
    """What a leader received, and what it continued."""

    core: Coordinator
    received: Received = field(default_factory=list)
    kept: JobState | None = None
    gone: tuple[str, ...] = ()


def recorded(run: Callable[[], object]) -> Book | None:
    """The record of the leader that received the last message of a run, which may break a promise."""
    books: dict[int, Book] = {}
    last: Book | None = None
    handle, resume = Coordinator.handle, Coordinator.resume

    def book_of(core: Coordinator) -> Book:
        return books.setdefault(id(core), Book(core))

    def listen(core: Coordinator, event: ev.Event, now: float) -> list[ev.Send]:
        nonlocal last
        last = book_of(core)
        last.received.append((now, event))
        return handle(core, event, now)

    def continued(core: Coordinator, state: JobState, gone: Iterable[str], now: float) -> None:
        book = book_of(core)
        book.kept, book.gone = state, tuple(gone)
        resume(core, state, book.gone, now)

    Coordinator.handle, Coordinator.resume = listen, continued  # type: ignore[assignment, method-assign]
    try:
        run()
    except Exception:  # noqa: BLE001  the broken promise was reported before
        pass
    finally:
        Coordinator.handle, Coordinator.resume = handle, resume  # type: ignore[method-assign]
    return last


def story_of(run: Callable[[], object], title: str) -> str:
    """The story; one line of explanation if the run has no leader or the notation lacks a word for an event."""
    book = recorded(run)
    if book is None:
        return "no leader received anything"
    core = book.core
    low, high = core.rules.limits
    names: dict[str, str] = {}
    try:
        rules = f"nodes={low}:{high} restarts={core.policy.max_restarts} term={core.roster.term}"
        rules += "" if book.kept is None else _continued(book.kept, book.gone, names)
        lines = tuple(_lines(book.received, names))
        rules += f" own={names[core.own_node_id]}" if core.own_node_id in names else ""
        return "\n".join([f"== {title}", rules, *played(Story(FOLDER, title, rules, lines))])
    except (LookupError, AssertionError) as error:
        return f"its coordinator's story has what the notation has no word for: {error}"


def _continued(kept: JobState, gone: tuple[str, ...], names: dict[str, str]) -> str:
    """The beginning of a story whose leader continued a job."""
    if kept.last_round is None or kept.asks or kept.verdict is not None:
        raise LookupError("a job without a round, with a request, or with a verdict")
    round_ = kept.last_round
    of = [_name(node_id, names) for node_id in round_.node_ids]
    rules = f" resumed={''.join(of)} round={round_.number} of_term={round_.term} count={kept.restart_count}"
    rules += f" led={round_.leader_rank}" if round_.leader_rank >= 0 else ""
    known = [names[each] for each in gone if each in names]
    rules += f" gone={''.join(known)}" if known else ""
    return rules + (f" departed={''.join(of[rank] for rank in kept.departed)}" if kept.departed else "")


def _lines(received: Received, names: dict[str, str]) -> Iterator[str]:
    before = None
    statuses: dict[str, m.Status] = {}  # the latest of each node
    for now, event in received:
        if before is not None and now - before >= 0.001:
            yield f"{ceil(1000 * (now - before)) / 1000:.3f} s pass"  # no timer fires too early
        before = now if before is None or now - before >= 0.001 else before
        yield _line(event, names, statuses)


def _name(node_id: str, names: dict[str, str]) -> str:
    return names.setdefault(node_id, ascii_lowercase[len(names)])


def _line(event: ev.Event, names: dict[str, str], before: dict[str, m.Status]) -> str:
    match event:
        case ev.DeadlinePassed():
            return "a timer fires"
        case ev.Reported(node, status):
            earlier = None if event.is_new else before.get(node.node_id)
            before[node.node_id] = status
            return f"{_name(node.node_id, names)} {_reported(event, earlier)}"
        case ev.Broken(node_id):
            return f"{_name(node_id, names)} breaks off"
        case ev.Lost(node_id, reason, age_s):
            return f"{_name(node_id, names)} is lost{_ago('age', age_s)}: {reason}"
        case _:
            raise LookupError(type(event).__name__)


def _reported(event: ev.Reported, before: m.Status | None) -> str:  # noqa: C901  one case for each
    """The news in a status, if the notation has a word for it."""
    status, past = event.status, event.status.past
    if status.left is not None:
        return f"leaves: {status.left.reason}"
    if before is None and past.round == 0 and past.phase is m.NodePhase.READY:
        return f"joins{_rank(event.node)}"
    if before is None:
        return f"returns {past.phase.value}{_rank(event.node)}{_past(past)}"
    if status.ready_count != before.ready_count:
        return f"is ready{_rank(event.node)}"
    # A failure stays in a status after its round.
    is_newly = (past.phase, past.round) != (before.past.phase, before.past.round)
    if past.failure is not None and past.phase is m.NodePhase.FAILED and is_newly:
        return f"fails round={past.round} how={_how(past.failure)}{_ago('age', past.failure_age_s)}"
    if past.phase is m.NodePhase.FINISHED and before.past.phase is not past.phase:
        return f"succeeds round={past.round}"
    if past.has_opted_in and not before.past.has_opted_in:
        return f"opts in round={past.round}"
    if status.prepared_count != before.prepared_count:
        return f"is prepared {event.node.starts.value}"
    if status.node == before.node and past == before.past and status.asks == before.asks:
        return "repeats"
    if _wishes(status) == _wishes(before):
        return "has read"
    raise LookupError("a status with requests")


def _wishes(status: m.Status) -> tuple[object, ...]:
    """What a node requests or answers."""
    return status.asks, status.frozen, status.saved, status.question, status.places


def _how(cause: ProcessFailure) -> str:
    if cause.exitcode < 0:
        return "killed"
    return "reset" if "by peer" in cause.message else "raised"


def _rank(node: m.Node) -> str:
    return "" if node.preferred_rank is None else f" node_rank={node.preferred_rank}"


def _ago(word: str, seconds: float) -> str:
    return f" {word}={seconds:.3f}" if seconds >= 0.001 else ""


def _past(past: m.Past) -> str:
    words = f" round={past.round}" + f" term={past.term}" * (past.term > 0)
    words += f" how={_how(past.failure)}" if past.failure is not None else ""
    words += _ago("failed_ago", past.failure_age_s) + _ago("alone", past.alone_s)
    has = {
        "after_failure": past.failure is not None and past.phase is not m.NodePhase.FAILED,
        "unreported": past.failure is None and past.phase is m.NodePhase.FAILED,
        "ended": bool(past.ended),
        "charged": past.is_charged,
        "spares": past.has_spares,
    }
    return words + "".join(f" {word}" for word, is_so in has.items() if is_so)
