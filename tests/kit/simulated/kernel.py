"""Replaces the machine's kernel for simulated processes, while time passes in their world.

This is the only place that replaces the product's own code: where it opens a listening socket, reads random bytes or the
wall clock, or checks whether an address belongs to this machine.  Everything else that it uses belongs to the loop.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from aelastic.agent.group.worker_group import WorkerGroup
from aelastic.base.loop import clock
from aelastic.base.machine import Machine
from aelastic.rdzv import agent_link
from aelastic.rdzv.leader.leader import Leader
from aelastic.rdzv.member.member import Member
from aelastic.rdzv.protocol import stream
from aelastic.rdzv.stores.register import Register
from kit.simulated.insight import ObservedServer
from kit.simulated.sockets import SimulatedPort
from kit.simulated.world import LOOPBACK, World, address_of

# The cores whose events and actions a story includes.
NAMES = {WorkerGroup: "group", Member: "member", Leader: "leader", Register: "register"}


@contextmanager
def replaced_kernel(world: World) -> Iterator[None]:
    """Simulated processes may run inside the block."""
    replaced: list[tuple[Any, str, Any]] = [
        (agent_link, "HeldPort", SimulatedPort),
        (agent_link, "LeaderServer", ObservedServer),
        (stream, "_is_own", _is_own),
        (clock, "wall_ms", _wall_ms),
        (os, "urandom", world.urandom),
        (Machine, "handle", _noted(Machine.handle)),
    ]
    before = [(of, name, getattr(of, name)) for of, name, _ in replaced]
    for of, name, new in replaced:
        setattr(of, name, new)
    try:
        yield
    finally:
        for of, name, old in before:
            setattr(of, name, old)


def _process() -> Any:
    loop: Any = asyncio.get_running_loop()
    return loop.process


def _is_own(address: str) -> bool:
    return address in {LOOPBACK, "::1", address_of(_process().host)}


def _wall_ms() -> int:
    """The wall clock of the running process's host, which may be behind."""
    process = _process()
    return 1 + int(1000 * max(0.0, process.now - process.world.behind_s.get(process.host, 0.0)))


def _noted(handle: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a core's `handle`, to add its events and actions to the story of the world."""

    def handle_and_note(core: Any, event: Any, now: float) -> Any:
        actions = handle(core, event, now)
        name = NAMES.get(type(core))
        if name is not None and (process := _process()).is_alive:
            process.world.note(f"{process} {name}", event, actions)
            if isinstance(core, Member | Leader):
                process.watcher.keeps(process, core.log if isinstance(core, Member) else core.log.node)
        return actions

    return handle_and_note
