"""A world of nodes and endpoints around the functions of `aelastic.rdzv.log`: possible next moves, and invariants.

A world is immutable.  `moves` lists everything that may happen, in any order: a campaign, a message that arrives, a write,
an end, a reset, an endpoint that forgets.  A message that is not delivered is a move that is not made, so a frozen node, a
cut link or a silent endpoint needs no move of its own.  Neither does time: a lease may pass at any moment, so any node may
campaign at any moment.

A connection holds one status and one plan in transit, each replaced by the next one, and how each direction ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from aelastic.base.record import Record
from aelastic.rdzv.log import cell as cells
from aelastic.rdzv.log import leader as leading
from aelastic.rdzv.log import node as following
from aelastic.rdzv.log.cell import Cell
from aelastic.rdzv.log.entries import Entry, first_entry, log_of, order
from aelastic.rdzv.log.leader import Leader
from aelastic.rdzv.log.node import Close, Node, Plan, Status, whole_entries_of
from aelastic.rdzv.log.votes import Mandate

Move: TypeAlias = tuple[str | int, ...]
Agent: TypeAlias = Node | Leader


class BrokenPromiseError(AssertionError):
    """An invariant does not hold."""


@dataclass(frozen=True)
class Setup:
    """The beginning of a world, and the maximum number of faults of each kind.

    Args:
        nodes: how many nodes begin in a round, led by the first; with 0, all are new, and the endpoints are empty.
        spares: new agents that exist from the beginning.
        endpoints: several endpoints decide without the nodes.
        voters_max: the voters of a round; its other members have no vote.
        positions: the entries of a log.
        agents: new agents, each of which replaces one that ended.
        is_founding: candidates may begin a new log if the endpoint is empty.
    """

    nodes: int = 3
    spares: int = 0
    endpoints: int = 1
    voters_max: int = 9
    positions: int = 5
    has_verdict: bool = False
    is_founding: bool = False
    campaigns: int = 6
    ends: int = 0
    ends_by_reset: int = 0
    resets: int = 0
    forgets: int = 0
    agents: int = 0
    failures: int = 0

    @property
    def is_recovering(self) -> bool:
        return self.agents > 0 or self.is_founding


class Link(Record):
    """A connection of a follower to its leader.

    Args:
        status, plan: the messages in transit.
        up_close, down_close: how it ends for the leader and for the follower, after the messages in transit.
        is_new: the leader has not read a status on it yet.
        is_read: the leader has not read its end yet.
    """

    status: Status | None = None
    up_close: Close | None = None
    plan: Plan | None = None
    down_close: Close | None = None
    is_new: bool = True
    is_read: bool = True


class Left(Record):
    """The faults that may still happen."""

    campaigns: int
    ends: int
    ends_by_reset: int
    resets: int
    forgets: int
    agents: int
    failures: int

    def less(self, kind: str) -> Left:
        return self.replace(**{kind: getattr(self, kind) - 1})


class World(Record):
    """Everything at one moment.

    Args:
        agents: the living agents.
        links: connections, by follower and leader.
        logs: the committed entries of each log.
        newest: the newest entry ever committed, as (term, number).
        ran: the newest round that each node took part in.
        gone: nodes that ended and whose slots are free.
        words: how many incarnations and names were generated.
    """

    setup: Setup
    agents: dict[str, Agent]
    links: dict[tuple[str, str], Link]
    cells: tuple[Cell | None, ...]
    logs: dict[str, tuple[Entry, ...]]
    newest: tuple[int, int]
    ran: dict[str, tuple[int, int]]
    gone: frozenset[str]
    left: Left
    words: int

    def __hash__(self) -> int:
        parts = (self.agents, self.links, self.logs, self.ran)
        return hash((*(frozenset(part.items()) for part in parts), self.cells, self.newest, self.gone, self.left))


def node_of(agent: Agent) -> Node:
    return agent.node if isinstance(agent, Leader) else agent


def with_node(agent: Agent, node: Node) -> Agent:
    return agent.replace(node=node) if isinstance(agent, Leader) else node


def begin(setup: Setup) -> World:
    names, spares = "abcdef"[: setup.nodes], "stuv"[: setup.spares]
    left = Left(*(getattr(setup, name) for name in Left.__match_args__))
    agents: dict[str, Agent] = {name: Node(name) for name in (*names, *spares)}
    empty = World(setup, agents, {}, (None,) * setup.endpoints, {}, (-1, -1), {}, frozenset(), left, 0)
    if not names:
        return empty
    incarnations = tuple(f"w{endpoint}" for endpoint in range(setup.endpoints))
    voters = names[: setup.voters_max] if setup.endpoints == 1 else ()
    first = first_entry(1, names, voters, incarnations)
    agents |= {name: Node(name, 1, committed=first if name in voters or not voters else first.id) for name in names}
    full = tuple(Cell(word, first.log, 1, "", 0, first) for word in incarnations)
    world = empty.replace(agents=agents, cells=full, logs={first.log: (first,)}, newest=order(first))
    # Its first leader, which all follow.
    beginning: list[Move] = [("campaign", "a", "next")]
    beginning += [("connect", name, "a") for name in names[1:]]
    beginning += [("status", name, "a") for name in names[1:]]
    beginning += [("send", "a", name) for name in names[1:]]
    beginning += [("lock", "a", endpoint) for endpoint in range(setup.endpoints)]
    for move in beginning:
        world = must(do(world, move))
    return deliver_all(world)


def must(world: World | None) -> World:
    assert world is not None, "the move is possible"
    return world


# Possible next moves.


def moves(world: World) -> list[Move]:
    return [*_faults(world), *_deliveries(world), *_steps(world)]


def _faults(world: World) -> Iterator[Move]:  # noqa: C901, PLR0912  one line for each
    left, setup = world.left, world.setup
    for name, agent in world.agents.items():
        node = node_of(agent)
        if left.campaigns:
            yield "campaign", name, "next"
            if highest_term(world) > node.term:
                yield "campaign", name, "high"
            if setup.is_recovering:
                yield "campaign", name, "clock"
        if left.ends:
            yield "end", name
        if left.ends_by_reset:
            yield "end by reset", name
        if left.failures and isinstance(node.committed, Entry) and name in node.committed.members:
            yield "fail", name
        if node.leader:
            yield "lease passes", name
            if left.resets and not world.links[name, node.leader].down_close:
                yield "reset", name
        elif isinstance(agent, Leader):
            yield "lease passes", name
    if left.forgets:
        for endpoint, cell in enumerate(world.cells):
            if cell:
                yield "forget", endpoint
    if left.agents:
        for name in sorted(world.gone):
            yield "replace", name


def _deliveries(world: World) -> Iterator[Move]:
    for (name, leader), link in world.links.items():
        if link.is_read and link.status:
            yield "status", name, leader
        elif link.is_read and link.up_close:
            yield "closed at leader", name, leader
        if name in world.agents and node_of(world.agents[name]).leader == leader:
            if link.plan:
                yield "plan", name
            elif link.down_close:
                yield "closed at follower", name


def _steps(world: World) -> Iterator[Move]:
    for name, agent in world.agents.items():
        if isinstance(agent, Leader):
            yield from _steps_of(world, name, agent)


def _steps_of(world: World, name: str, leader: Leader) -> Iterator[Move]:  # noqa: C901, PLR0912  one line for each
    term, committed = leader.node.term, leader.node.committed
    for other, agent in world.agents.items():
        is_free = other != name and not is_connected(world, other, name)
        if is_free and following.may_follow(node_of(agent), name, term):
            yield "connect", other, name
    if any(is_given_up(leader, ref) for ref in _read_of(leader)):
        yield "give up", name
    for other, follower in leader.followers.items():
        if follower.is_open and not follower.has_plan and not leading.is_withheld(leader):
            yield "send", name, other
    for endpoint, cell in enumerate(world.cells):
        view = leader.views[endpoint]
        is_unlocked = view is None or cell is None or cell.term < term
        if is_unlocked and cells.may_lock(cell, name, term):
            yield "lock", name, endpoint
        if cell and view and (cell.leader, cell.term, cell.incarnation) == (name, term, view.incarnation):
            is_behind = order(committed) < order(cell.committed)
            has_news = (leader.proposal and not view.has_proposal) or order(committed) > order(cell.committed)
            if leading.must_begin_again(leader, view):
                yield "begin again", name, endpoint
            elif has_news and not is_behind and leading.may_write(leader, endpoint):
                yield "write", name, endpoint
    is_over = isinstance(committed, Entry) and (committed.is_verdict or committed.number >= world.setup.positions)
    if is_over:
        return
    if not leader.mandate:
        yield "establish", name
    elif leader.proposal:
        yield "commit", name
    else:
        others = [other for other, each in leader.followers.items() if each.is_open and each.status.term == term]
        for count in {0, len(others) - 1, len(others)} - {-1}:
            for chosen in combinations(others, count):
                yield "propose", name, *chosen
        if world.setup.has_verdict and committed is not None:
            yield "end the job", name


def _read_of(leader: Leader) -> list[object]:
    return [*(each.status.committed for each in leader.followers.values()), *(v.committed for v in leader.views if v)]


def is_given_up(leader: Leader, other: object) -> bool:
    return leading.must_give_up_log(leader, other, has_other_quorum=False)  # type: ignore[arg-type]


def is_connected(world: World, name: str, leader: str) -> bool:
    link = world.links.get((name, leader))
    is_there = link is not None and node_of(world.agents[name]).leader == leader
    return is_there and link is not None and not link.down_close


def highest_term(world: World) -> int:
    terms = [node_of(agent).term for agent in world.agents.values()]
    return max([*terms, *(cell.term for cell in world.cells if cell)])


# Moves.


class Draft:
    """A world while a move changes it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.agents, self.links, self.cells = dict(world.agents), dict(world.links), list(world.cells)

    def done(self, **changes: object) -> World:
        fields = {"agents": self.agents, "links": self.links, "cells": tuple(self.cells), **changes}
        return self.world.replace(**fields)

    def leader(self, name: str) -> Leader:
        agent = self.agents[name]
        assert isinstance(agent, Leader)
        return agent

    def change(self, key: tuple[str, str], **changes: object) -> None:
        """Changes a link, and drops it once neither end needs it."""
        link = self.links[key] = self.links[key].replace(**changes)
        is_followed = key[0] in self.agents and node_of(self.agents[key[0]]).leader == key[1]
        if not link.is_read and not is_followed:
            del self.links[key]

    def report(self, name: str) -> None:
        """A node sends its status, if it is connected."""
        node = node_of(self.agents[name])
        key = (name, node.leader)
        if node.leader and key in self.links and not self.links[key].up_close:
            self.links[key] = self.links[key].replace(status=following.status_of(node))

    def stop_role(self, name: str) -> None:
        """A node stops following or leading."""
        agent = self.agents[name]
        leader = node_of(agent).leader
        connected = [key[0] for key in self.links if key[1] == name and isinstance(agent, Leader)]
        words = following.farewells(leader, tuple(connected))
        if isinstance(agent, Leader):
            self.agents[name] = leading.step_down(agent)
        elif leader:
            self.agents[name] = agent.replace(leader="", has_read_plan=False, leader_accepted=None)
        for other in connected:
            link = self.links[other, name]
            self.change((other, name), down_close=link.down_close or words.get(other), is_read=False, status=None)
        if leader:
            link = self.links[name, leader]
            self.change((name, leader), up_close=link.up_close or words.get(leader), plan=None)

    def cut(self, name: str, close: Close) -> None:
        """All connections of a node end, and it is gone."""
        del self.agents[name]
        is_reset = close is not Close.ORDERLY
        for key, link in list(self.links.items()):
            if key[0] == name:
                self.change(key, up_close=link.up_close or close, status=None if is_reset else link.status)
            elif key[1] == name:
                plan = None if is_reset else link.plan
                self.change(key, down_close=link.down_close or close, plan=plan, is_read=False)


def do(world: World, move: Move) -> World | None:
    """The world after a move; `None` if the move is not possible now."""
    return MOVES[str(move[0])](world, *move[1:])


def _campaign(world: World, name: str, kind: str) -> World:
    draft = Draft(world)
    agent = world.agents[name]
    own = node_of(agent).term
    highest = highest_term(world)
    now = 10_000 * (1 + world.setup.campaigns - world.left.campaigns)  # the clock is ahead of all terms
    if kind == "clock":
        term = leading.term_from_clock(now, own)
    else:
        term = leading.next_term(own if kind == "next" else highest)
    has_listened = kind == "clock"
    if isinstance(agent, Leader):
        draft.agents[name] = leading.campaign_again(agent, term, has_listened=has_listened)
    else:
        draft.stop_role(name)
        node = node_of(draft.agents[name])
        draft.agents[name] = leading.campaign(node, term, world.setup.endpoints, has_listened=has_listened)
    return draft.done(left=world.left.less("campaigns"))


def _connect(world: World, name: str, leader: str) -> World:
    draft = Draft(world)
    draft.stop_role(name)
    if (name, leader) in draft.links:  # the leader has not read the end of an earlier connection
        del draft.links[name, leader]
        old = draft.leader(leader)
        if name in old.followers and old.followers[name].is_open:
            draft.agents[leader] = leading.on_follower_closed(old, name, Close.ABORTED)
    node = following.follow(node_of(draft.agents[name]), leader, draft.leader(leader).node.term)
    draft.agents[name] = node
    draft.links[name, leader] = Link(following.status_of(node))
    return draft.done()


def _status(world: World, name: str, leader: str) -> World:
    draft = Draft(world)
    link, agent = world.links[name, leader], draft.leader(leader)
    assert link.status
    read = leading.on_connected if link.is_new else leading.on_status
    draft.agents[leader] = read(agent, name, link.status)
    draft.change((name, leader), status=None, is_new=False)
    return draft.done()


def _closed_at_leader(world: World, name: str, leader: str) -> World:
    draft = Draft(world)
    link, agent = world.links[name, leader], draft.leader(leader)
    assert link.up_close
    if not link.is_new:
        draft.agents[leader] = leading.on_follower_closed(agent, name, link.up_close)
    draft.change((name, leader), is_read=False)
    return draft.done()


def _send(world: World, leader: str, name: str) -> World:
    draft = Draft(world)
    agent = draft.leader(leader)
    plan = leading.plan_for(agent, name)
    draft.agents[leader] = leading.on_plan_sent(agent, name)
    key = name, leader
    if key in draft.links and name in draft.agents and is_connected(world, name, leader):
        draft.links[key] = draft.links[key].replace(plan=plan)
    return draft.done()


def _plan(world: World, name: str) -> World:
    draft = Draft(world)
    agent = draft.agents[name]
    assert isinstance(agent, Node)
    plan = world.links[name, agent.leader].plan
    assert plan
    if following.must_join_anew(agent, plan):
        return _join_anew(world, name)
    after = draft.agents[name] = following.on_plan(agent, plan)
    draft.change((name, agent.leader), plan=None)
    if following.must_report(agent, after):
        draft.report(name)
    return draft.done(ran=_having_run(world, draft.agents[name]))


def _having_run(world: World, agent: Agent) -> dict[str, tuple[int, int]]:
    """Records that a node takes part in the newest round that it knows is committed."""
    node = node_of(agent)
    if not isinstance(node.committed, Entry) or node.name not in node.committed.members:
        return world.ran
    last, now = world.ran.get(node.name, (-1, -1)), order(node.committed)
    held = (order(entry) for each in world.agents.values() for entry in whole_entries_of(node_of(each)))
    if now < last and last not in held:
        return world.ran  # a recovery: no node has that entry any more, and this node runs no older round
    if now < last:
        raise BrokenPromiseError(f"{node.name} takes part in a round {now} after {last}")
    return {**world.ran, node.name: now}


def _closed_at_follower(world: World, name: str) -> World:
    draft = Draft(world)
    agent = draft.agents[name]
    assert isinstance(agent, Node)
    key = name, agent.leader
    close = world.links[key].down_close
    assert close
    draft.agents[name] = following.on_leader_closed(agent, close)
    # It reads the end and closes its own side: messages that it has sent arrive if the leader still reads.
    draft.change(key, up_close=world.links[key].up_close or close)
    return draft.done()


def _lease_passes(world: World, name: str) -> World:
    draft = Draft(world)
    draft.stop_role(name)
    return draft.done()


def _lock(world: World, name: str, endpoint: int) -> World:
    draft = Draft(world)
    leader = draft.leader(name)
    new = f"x{world.words}"
    cell = cells.lock(world.cells[endpoint], name, leader.node.term, log_of(leader.node.committed), new)
    draft.cells[endpoint] = cell
    draft.agents[name] = leading.on_locked(leader, endpoint, cell)
    return draft.done(words=world.words + (cell.incarnation == new))


def _begin_again(world: World, name: str, endpoint: int) -> World:
    draft = Draft(world)
    leader, cell = draft.leader(name), world.cells[endpoint]
    assert cell
    cell = cells.begin_again(cell, log_of(leader.node.committed), f"x{world.words}")
    draft.cells[endpoint] = cell
    draft.agents[name] = leading.on_locked(leader, endpoint, cell)
    return draft.done(words=world.words + 1)


def _write(world: World, name: str, endpoint: int) -> World:
    draft = Draft(world)
    leader, cell = draft.leader(name), world.cells[endpoint]
    assert cell
    written = leading.cell_for(leader, cell).replace(renewals=0)  # not needed here
    draft.cells[endpoint] = written
    draft.agents[name] = leading.on_cell_written(leader, endpoint, written)
    return draft.done()


def _establish(world: World, name: str) -> World | None:
    draft = Draft(world)
    leader = leading.establish(draft.leader(name))
    if leader is None:
        return None
    draft.agents[name] = leader
    return draft.done()


def _propose(world: World, name: str, *others: str) -> World:
    draft = Draft(world)
    leader = draft.leader(name)
    failures = [*leader.node.failures, *(f for each in leader.followers.values() for f in each.status.failures)]
    members = sorted((name, *others))
    known = isinstance(leader.node.committed, Entry) and leader.node.committed.voters
    members.sort(key=lambda member: not known or member not in known)
    voters = members[: world.setup.voters_max] if world.setup.endpoints == 1 else []
    draft.agents[name] = leading.propose(leader, members, voters, failures=failures)
    return draft.done()


def _end_the_job(world: World, name: str) -> World:
    draft = Draft(world)
    leader = draft.leader(name)
    committed = leader.node.committed
    assert isinstance(committed, Entry)
    draft.agents[name] = leading.propose(leader, committed.members, committed.voters, is_verdict=True)
    return draft.done()


def _commit(world: World, name: str) -> World | None:
    draft = Draft(world)
    before = draft.leader(name)
    leader = leading.commit(before)
    if leader is None:
        return None
    assert before.proposal
    draft.agents[name] = leader
    world = with_committed(world, before, before.proposal)
    return draft.done(logs=world.logs, newest=world.newest, ran=_having_run(world, leader))


def _fail(world: World, name: str) -> World:
    draft = Draft(world)
    agent = draft.agents[name]
    node = node_of(agent)
    failure = f"{name}{world.left.failures}"
    draft.agents[name] = with_node(agent, node.replace(failures=(*node.failures, failure)))
    draft.report(name)
    return draft.done(left=world.left.less("failures"))


def _end(world: World, name: str) -> World:
    draft = Draft(world)
    draft.cut(name, Close.ORDERLY)
    return draft.done(gone=world.gone | {name}, left=world.left.less("ends"))


def _end_by_reset(world: World, name: str) -> World:
    draft = Draft(world)
    draft.cut(name, Close.ABORTED)
    return draft.done(gone=world.gone | {name}, left=world.left.less("ends_by_reset"))


def _reset(world: World, name: str) -> World:
    draft = Draft(world)
    key = name, node_of(draft.agents[name]).leader
    close = following.close_of_living_node()
    up_close = world.links[key].up_close or close
    draft.change(key, status=None, plan=None, up_close=up_close, down_close=close)
    return draft.done(left=world.left.less("resets"))


def _forget(world: World, endpoint: int) -> World:
    draft = Draft(world)
    draft.cells[endpoint] = None
    return draft.done(left=world.left.less("forgets"))


def _replace(world: World, name: str) -> World:
    draft = Draft(world)
    new = f"n{world.words}"
    draft.agents[new] = Node(new, replaces=(name,))
    gone = world.gone - {name}
    return draft.done(gone=gone, left=world.left.less("agents"), words=world.words + 1)


def _join_anew(world: World, name: str) -> World:
    """An agent gives up its log: its node is gone, and it joins under a new name."""
    draft = Draft(world)
    draft.cut(name, following.close_of_living_node())
    new = f"n{world.words}"
    draft.agents[new] = Node(new, replaces=(name,))
    return draft.done(words=world.words + 1)


MOVES: dict[str, Callable[..., World | None]] = {
    "campaign": _campaign,
    "connect": _connect,
    "status": _status,
    "closed at leader": _closed_at_leader,
    "send": _send,
    "plan": _plan,
    "closed at follower": _closed_at_follower,
    "lease passes": _lease_passes,
    "lock": _lock,
    "begin again": _begin_again,
    "write": _write,
    "establish": _establish,
    "propose": _propose,
    "end the job": _end_the_job,
    "commit": _commit,
    "fail": _fail,
    "end": _end,
    "end by reset": _end_by_reset,
    "reset": _reset,
    "forget": _forget,
    "replace": _replace,
    "give up": _join_anew,
}


def deliver_all(world: World) -> World:
    """The world after all messages in transit have arrived."""
    while move := next(_deliveries(world), None):
        after = do(world, move)
        assert after is not None
        world = after
    return world


# The invariants.


def with_committed(world: World, leader: Leader, entry: Entry) -> World:
    """The world after a leader commits an entry.

    Raises:
        BrokenPromiseError: the leader must not commit it.
    """
    log = world.logs.get(entry.log, ())
    place = entry.number - 1
    if place < len(log):
        if log[place] == entry:
            return world
        _check_second(world, log, entry)
        log = log[:place]
    # Recovery may adopt an entry that is older than one known only to nodes that have ended.
    is_recovered = leader.mandate is Mandate.RECOVERY and entry.term < leader.node.term
    if order(entry) <= world.newest and entry.log in world.logs and not is_recovered:
        raise BrokenPromiseError(f"{described(entry)} is not newer than {world.newest}")
    if len(set(entry.charged)) < len(entry.charged):
        raise BrokenPromiseError(f"{described(entry)} charges twice: {entry.charged}")
    for other in (each for name, entries in world.logs.items() if name != entry.log for each in entries):
        if shared := set(filter(None, entry.incarnations)).intersection(other.incarnations):
            raise BrokenPromiseError(f"{described(entry)} and {described(other)} count on the memory of {shared}")
    if not log:
        _check_founding(world, leader, entry)
    elif entry.parent != log[-1].id or log[-1].is_verdict:
        raise BrokenPromiseError(f"{described(entry)} does not follow {described(log[-1])}")
    newest = max(order(entry), world.newest)
    return world.replace(logs={**world.logs, entry.log: (*log, entry)}, newest=newest)


def _check_second(world: World, log: tuple[Entry, ...], entry: Entry) -> None:
    """Recovery may drop only an entry that no living node knows and takes part in."""
    place = entry.number - 1
    nodes = [node_of(agent) for agent in world.agents.values()]
    later = {each.id for each in log[place:]}
    knowing = [node for node in nodes if isinstance(node.committed, Entry) and node.committed.id in later]
    running = [
        node.name for node in knowing if isinstance(node.committed, Entry) and node.name in node.committed.members
    ]
    if running or not world.setup.is_recovering or not place:
        raise BrokenPromiseError(
            f"position {entry.number} has {described(log[place])} (on {running}) and {described(entry)}"
        )


def _check_founding(world: World, leader: Leader, entry: Entry) -> None:
    used = world.setup.forgets - world.left.forgets
    if len(world.logs) > used:
        raise BrokenPromiseError(f"{described(entry)} begins a log, though no endpoint has forgotten the one before")
    if order(entry) <= world.newest:
        raise BrokenPromiseError(f"{described(entry)} is not newer than {world.newest}")
    answered = leader.followers.keys()
    for name in answered:
        known = leader.followers[name].status.committed
        others = {*known.voters} - {leader.node.name, name, *answered} if isinstance(known, Entry) else set()
        if living := sorted(others & world.agents.keys()):
            raise BrokenPromiseError(f"{described(entry)} begins a log, though {living} live in {described(known)}")


def described(entry: object) -> str:
    if not isinstance(entry, Entry):
        return str(entry)
    kind = "verdict" if entry.is_verdict else "round"
    voters = ",".join(entry.voters)
    return (
        f"{kind} {entry.number} of term {entry.term}, {{{voters}}}+{'+'.join(entry.incarnations)}, in log {entry.log}"
    )
