"""A run of the simulation as a text story: what its last coordinator was told, in the notation of `kit.stories.coordinator`.

Nodes get letters in the order in which the coordinator met them, and no host or time but what the notation has.  The core is
then asked anew what it makes of each line, so the story shows this core's own decisions; `tests/core/stories` can hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from string import ascii_lowercase
from typing import Any

from aelastic.errors import ProcessFailure
from aelastic.rdzv.coordinator import coordinator_events as ev
from aelastic.rdzv.coordinator.coordinator import Coordinator
from aelastic.rdzv.protocol import messages as m
from kit.stories.coordinator import told
from kit.stories.files import FOLDER, Story

Heard = list[tuple[float, ev.Event]]


def recorded(run: Callable[[], object]) -> tuple[Coordinator | None, Heard]:
    """What the coordinator that heard something last was told in a run, which may break a promise."""
    books: dict[int, tuple[Coordinator, Heard]] = {}
    last: Coordinator | None = None
    handle = Coordinator.handle

    def listen(core: Coordinator, event: ev.Event, now: float) -> list[ev.Send]:
        nonlocal last
        last = core
        books.setdefault(id(core), (core, []))[1].append((now, event))
        return handle(core, event, now)

    Coordinator.handle = listen  # type: ignore[assignment, method-assign]
    try:
        run()
    except Exception:  # noqa: BLE001  what is broken was said before
        pass
    finally:
        Coordinator.handle = handle  # type: ignore[method-assign]
    return books[id(last)] if last is not None else (None, [])


def story_of(run: Callable[[], object], title: str) -> str:
    """The story; without a coordinator, or for what the notation has no word for, one line that says so."""
    core, heard = recorded(run)
    if core is None:
        return "no coordinator was told anything"
    low, high = core.rules.limits
    rules = f"nodes={low}:{high} restarts={core.policy.max_restarts} epoch={core.roster.epoch} unconfirmed"
    if core.seat_before is not None:
        fence, rank = core.seat_before
        rules += f" heir before={rank} fence={fence}"
    names: dict[str, str] = {}
    try:
        lines = tuple(_lines(heard, names))
        rules += f" own={names[core.own_node_id]}" if core.own_node_id in names else ""
        return "\n".join([f"== {title}", rules, *told(Story(FOLDER, title, rules, lines))])
    except (LookupError, AssertionError) as error:
        return f"its coordinator's story has what the notation has no word for: {error}"


def _lines(heard: Heard, names: dict[str, str]) -> Iterator[str]:
    before, last = None, None
    statuses: dict[str, m.Status] = {}  # the last of each node
    for now, event in heard:
        if isinstance(event, ev.Confirmed) and event == last:
            continue  # with each renewal
        last = event
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
        case ev.Confirmed(losses):
            return f"{next(iter(names.values()), 'a')} confirms losses={losses}"
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


def _reported(event: ev.Reported, before: m.Status | None) -> str:
    """What is new in a status, if the notation has a word for it."""
    status, past = event.status, event.status.past
    if status.left is not None:
        return f"leaves: {status.left.reason}"
    if before is None and past.round == 0 and past.standing is m.Standing.READY:
        return f"joins{_rank(event.node)}{' knew_another' * event.knew_another}"
    if before is None:
        return f"returns {past.standing.value}{_rank(event.node)}{_past(past)}"
    if status.ready_count != before.ready_count:
        return f"is ready{_rank(event.node)}"
    # A failure stays in a status after its round.
    is_newly = (past.standing, past.round) != (before.past.standing, before.past.round)
    if past.failure is not None and past.standing is m.Standing.FAILED and is_newly:
        return f"fails round={past.round} how={_how(past.failure)}{_ago('age', past.failure_age_s)}"
    if past.standing is m.Standing.FINISHED and before.past.standing is not past.standing:
        return f"succeeds round={past.round}"
    if past.has_opted_in and not before.past.has_opted_in:
        return f"opts in round={past.round}"
    if status.prepared_count != before.prepared_count:
        return f"is prepared {event.node.starts.value}"
    if status.node == before.node and past == before.past and status.asks == before.asks:
        return "repeats"
    raise LookupError("a status with requests, or that a plan was read")


def _how(cause: ProcessFailure) -> str:
    if cause.exitcode < 0:
        return "killed"
    return "reset" if "by peer" in cause.message else "raised"


def _rank(node: m.Node) -> str:
    return "" if node.preferred_rank is None else f" node_rank={node.preferred_rank}"


def _ago(word: str, seconds: float) -> str:
    return f" {word}={seconds:.3f}" if seconds >= 0.001 else ""


def _past(past: m.Past) -> str:
    told: list[tuple[str, Any, Any]] = [
        ("round", past.round, None),
        ("of", past.group_world_size, None),
        ("rank", past.group_rank, None),
        ("restarts", past.restart_count, 0),
        ("coordinator", past.coordinator_rank, -1),
        ("epoch", past.epoch, 0),
    ]
    words = "".join(f" {word}={value}" for word, value, usual in told if value != usual)
    words += f" how={_how(past.failure)}" if past.failure is not None else ""
    words += _ago("failed_ago", past.failure_age_s) + _ago("alone", past.alone_s)
    has = {
        "after_failure": past.failure is not None and past.standing is not m.Standing.FAILED,
        "unreported": past.failure is None and past.standing is m.Standing.FAILED,
        "ended": bool(past.ended),
        "charged": past.is_charged,
        "spares": past.has_spares,
    }
    return words + "".join(f" {word}" for word, is_so in has.items() if is_so)
