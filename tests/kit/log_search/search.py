"""Searches the worlds of `world`, breadth first or by random walks; shrinks and prints a failing path.

PYTHONPATH=.:tests python -m kit.log_search.search          the design, in all its setups, until it is interrupted
PYTHONPATH=.:tests python -m kit.log_search.search half     first seeds that notice one broken rule
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from aelastic.rdzv.log import leader as leading
from aelastic.rdzv.log.entries import Entry, order
from aelastic.rdzv.log.leader import Leader
from kit.log_search.world import (
    BrokenPromiseError,
    Move,
    Setup,
    World,
    begin,
    deliver_all,
    described,
    do,
    moves,
    must,
    node_of,
)

WEIGHTS = {
    "campaign": 0.1, "end": 0.06, "end by reset": 0.04, "reset": 0.05, "forget": 0.04, "lease passes": 0.01, "replace": 0.3,
    "fail": 0.1, "connect": 1.5, "status": 1.5, "commit": 3, "establish": 2, "end the job": 0.1,
}  # fmt: skip
MOVES_MAX = 80  # of a walk
# The search tries a quiet period after one in this many moves.
QUIET_EVERY = 20


class FoundError(AssertionError):
    """A path that breaks an invariant."""

    def __init__(self, why: str, setup: Setup, path: Sequence[Move]) -> None:
        self.why, self.path = why, path
        lines = (f"  {' '.join(map(str, move))}" for move in path)
        super().__init__("\n".join([why, repr(setup), *lines]))


def walk(
    setup: Setup,
    seed: int,
    *,
    beginning: Sequence[Move] = (),
    weights: Mapping[str, float] | None = None,
    is_live: bool = True,
    is_shrunk: bool = True,
) -> int:
    """Makes one random walk; returns its length.

    Args:
        beginning: first moves; skips those that are not possible.
        weights: weights of kinds of moves that differ from `WEIGHTS`.
        is_live: also look for a job that does not continue.

    Raises:
        FoundError: an invariant does not hold.
    """
    rng = random.Random(seed)
    weighed = {**WEIGHTS, **(weights or {})}
    world, path = begin(setup), list[Move]()
    for move in beginning:
        after = do(world, move) if move in moves(world) else None
        if after is not None:
            world = after
            path.append(move)
    while len(path) < MOVES_MAX:
        options, after = moves(world), None
        while options and after is None:
            move = rng.choices(options, [weighed.get(str(each[0]), 1) for each in options])[0]
            options.remove(move)
            try:
                after = do(world, move)
            except BrokenPromiseError as error:
                path.append(move)
                raise FoundError(f"{error} (seed {seed})", setup, shrunk(setup, path) if is_shrunk else path) from None
        if after is None:
            break
        world = after
        path.append(move)
        if is_live and rng.random() < 1 / QUIET_EVERY and (why := dead_end(world)):
            raise FoundError(f"{why} (seed {seed})", setup, path)
    return len(path)


def breadth_first(setup: Setup, states_max: int, seed: int = 1) -> int:
    """Visits all worlds, nearest first; returns how many."""
    rng = random.Random(seed)
    first = begin(setup)
    seen, frontier = {hash(first)}, [(first, _Link())]
    while frontier and len(seen) < states_max:
        later = []
        for world, link in frontier:
            if rng.random() < 1 / QUIET_EVERY and (why := dead_end(world)):
                raise FoundError(why, setup, link.path())
            for move in moves(world):
                try:
                    after = do(world, move)
                except BrokenPromiseError as error:
                    raise FoundError(str(error), setup, _Link(link, move).path()) from None
                if after is not None and (key := hash(after)) not in seen:
                    seen.add(key)
                    later.append((after, _Link(link, move)))
            if len(seen) >= states_max:
                break
        frontier = later
    return len(seen)


class _Link:
    """The last move of a path; paths share beginnings."""

    __slots__ = ("before", "move")

    def __init__(self, before: _Link | None = None, move: Move = ()) -> None:
        self.before, self.move = before, move

    def path(self) -> list[Move]:
        link: _Link | None = self
        found = []
        while link and link.move:
            found.append(link.move)
            link = link.before
        return found[::-1]


def shrunk(setup: Setup, path: list[Move]) -> list[Move]:
    """The path without the moves that it does not need."""
    place = 0
    while place < len(path):
        shorter = path[:place] + path[place + 1 :]
        path, place = (shorter, max(place - 3, 0)) if _breaks(setup, shorter) else (path, place + 1)
    return path


def _breaks(setup: Setup, path: list[Move]) -> bool:
    world = begin(setup)
    for move in path:
        if move not in moves(world):
            return False
        try:
            after = do(world, move)
        except BrokenPromiseError:
            return True
        if after is None:
            return False
        world = after
    return False


# Progress: in a quiet period one node campaigns, all messages arrive, and one more entry is committed.


def dead_end(world: World) -> str:
    """Why the job does not continue though a quorum is alive; empty if it does, or without a quorum."""
    if len(world.logs) != 1:
        return ""
    [log] = world.logs.values()
    last = log[-1]
    if last.is_verdict:
        return ""
    for has_endpoints in (True, False) if last.voters else (True,):
        for name in world.agents:
            if last.voters and name not in last.voters:
                continue
            try:
                stuck = stuck_after(world, name, has_endpoints=has_endpoints)
            except BrokenPromiseError as error:
                return str(error)
            if stuck and has_quorum(stuck, has_endpoints=has_endpoints):
                [stuck_log] = stuck.logs.values()
                return f"{name} cannot continue {described(stuck_log[-1])}, a quorum of which lives; endpoint: {has_endpoints}"
    return ""


def stuck_after(world: World, name: str, *, has_endpoints: bool) -> World | None:
    """The world after a quiet period in which one node campaigns; `None` if another entry was committed."""
    world = deliver_all(world)
    if name not in world.agents:
        return None
    kind = "clock" if world.setup.is_founding else "high"  # needed to found a log
    world = _each(must(do(world, ("campaign", name, kind))), "connect", leader=name)
    while True:
        world = _exchanged(world, name)
        if has_endpoints:
            world = _each(_each(world, "lock", name), "begin again", name)
        after = do(world, ("establish", name))
        if after is None:
            return None if _is_over(world, name) else world
        if not _leader(after, name).mandate:
            world = after
            continue
        was_pending = _leader(after, name).proposal is not None
        world = after if was_pending else must(do(after, ("propose", name, *_voters_that_answered(after, name))))
        if has_endpoints:
            world = _each(world, "write", name)
        world = _exchanged(world, name)
        after = do(world, ("commit", name))
        if after is None:  # a new voter waits for the endpoint, by rule
            return None if leading.is_withheld(_leader(world, name)) and not has_endpoints else world
        if not was_pending:
            return None
        world = after


def _each(world: World, kind: str, *first: str, leader: str = "") -> World:
    """The world after all currently possible moves of a kind."""
    for move in moves(world):
        if move[: 1 + len(first)] == (kind, *first) and move[-1] == (leader or move[-1]):
            world = must(do(world, move))
    return world


def _voters_that_answered(world: World, name: str) -> list[str]:
    leader = _leader(world, name)
    committed = leader.node.committed
    answers = {other for other, each in leader.followers.items() if each.status.term == leader.node.term}
    voters = set(committed.voters) if isinstance(committed, Entry) and committed.voters else set(world.agents)
    return sorted(voters & answers)


def _leader(world: World, name: str) -> Leader:
    leader = world.agents[name]
    assert isinstance(leader, Leader)
    return leader


def _is_over(world: World, name: str) -> bool:
    committed = node_of(world.agents[name]).committed
    return isinstance(committed, Entry) and committed.is_verdict


def _exchanged(world: World, name: str) -> World:
    """The world after all plans of a leader and their answers."""
    world = deliver_all(world)
    while (after := deliver_all(_each(world, "send", name))) != world:
        world = after
    return world


def has_quorum(world: World, *, has_endpoints: bool) -> bool:
    """Whether the newest configuration that a living node knows, and each committed after it, has a living quorum."""
    [log] = world.logs.values()
    known = [order(node_of(agent).committed) for agent in world.agents.values()]
    known += [order(cell.committed) for cell in world.cells if cell and has_endpoints]
    # A recovery may have replaced an entry that a living node knows by its id.
    last = max((each for each in known if each in {*map(order, log)}), default=order(None))
    if last == order(None) and not has_endpoints:
        return False  # the endpoints decide how a log begins
    for entry in log:
        if order(entry) < last:
            continue
        alive = sum(name in world.agents for name in entry.voters)
        words = [cell and cell.incarnation for cell in world.cells] if has_endpoints else []
        endpoints = sum(word == named for word, named in zip(words, entry.incarnations, strict=False))
        if entry.is_verdict or 2 * (2 * alive + endpoints) <= 2 * len(entry.voters) + len(entry.incarnations):
            return False
    return True
