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
    for now, event in heard:
        if isinstance(event, ev.Confirmed) and event == last:
            continue  # with each renewal
        last = event
        if before is not None and now - before >= 0.001:
            yield f"{ceil(1000 * (now - before)) / 1000:.3f} s pass"  # no timer fires too early
        before = now if before is None or now - before >= 0.001 else before
        yield _line(event, names)


def _name(node_id: str, names: dict[str, str]) -> str:
    return names.setdefault(node_id, ascii_lowercase[len(names)])


def _line(event: ev.Event, names: dict[str, str]) -> str:  # noqa: C901  one case for each event
    match event:
        case ev.DeadlinePassed():
            return "a timer fires"
        case ev.Confirmed(losses):
            return f"{next(iter(names.values()), 'a')} confirms losses={losses}"
        case m.Ready(node):
            return f"{_name(node.node_id, names)} is ready{_rank(node)}"
        case ev.Registered(node, past, knew_another):
            name = _name(node.node_id, names)
            if past.round == 0 and past.standing is m.Standing.READY:
                return f"{name} joins{_rank(node)}{' knew_another' * knew_another}"
            return f"{name} returns {past.standing.value}{_rank(node)}{_past(past)}"
        case m.Failed(node_id, round_, cause, age_s):
            return f"{_name(node_id, names)} fails round={round_} how={_how(cause)}{_ago('age', age_s)}"
        case m.Succeeded(node_id, round_):
            return f"{_name(node_id, names)} succeeds round={round_}"
        case m.Left(node_id, reason):
            return f"{_name(node_id, names)} leaves: {reason}"
        case ev.Broken(node_id):
            return f"{_name(node_id, names)} breaks off"
        case ev.Lost(node_id, reason, age_s):
            return f"{_name(node_id, names)} is lost{_ago('age', age_s)}: {reason}"
        case _:
            raise LookupError(type(event).__name__)


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
