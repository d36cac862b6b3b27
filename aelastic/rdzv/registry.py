"""The interface between the supervisor and the job's leader, and the rendezvous back ends by name.

A job of one node needs no connection: its leader is in the agent's own process.  All others go through
`agent_link.py` or `torch_handler_link.py`.  `agent/link.py` chooses.

`register` gives your own store a name, and `RendezvousSettings.backend` selects it.  All other names are torch's: its
own, and those of the entry-point group `torchrun.handlers`.  `torch:NAME` selects one of these explicitly.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from aelastic.base.loop import clock
from aelastic.base.loop.mailbox import Mailbox
from aelastic.base.record import Record
from aelastic.errors import InputError
from aelastic.rdzv.protocol.messages import LeaderMessage, NodeMessage
from aelastic.rdzv.single_node import SingleNode

if TYPE_CHECKING:
    from aelastic.rdzv.member.agreed import Agreed
    from aelastic.rdzv.settings import RendezvousSettings
    from aelastic.rdzv.stores.store import Store


class Link(Protocol):
    """This node's link to the job's leader, wherever that runs."""

    @property
    def coordinates(self) -> bool:
        """Whether the job's leader is in this agent now."""

    @property
    def agreed(self) -> Agreed | None:
        """What this node knows of the job's log, or `None`."""

    def send(self, message: NodeMessage) -> None:
        """Passes a message on, in order.  Never blocks."""

    async def run(self, deliver: Callable[[LeaderMessage], None]) -> None:
        """Delivers the leader's messages, in order.  Runs until cancelled, and then leaves nothing behind.

        Raises:
            InputError: the job refuses this agent, for the reason given.
            RendezvousError: no leader could be reached for too long, or the server there is not a rendezvous
                store.
        """

    async def finish(self) -> None:
        """Leaves in order, while `run` still runs: sends all messages, hands over what this agent holds.  Bounded."""

    def cut_short(self) -> None:
        """Ends or prevents the wait of `finish` for agents that do not know yet how the job ended.  Never blocks."""


class InProcessLink:
    """A leader in this process, for the one node of its job."""

    coordinates, agreed = True, None

    def __init__(self, coordinator: SingleNode) -> None:
        self._coordinator = coordinator
        self._mailbox: Mailbox[NodeMessage] = Mailbox()

    def send(self, message: NodeMessage) -> None:
        self._mailbox.post(message)

    async def run(self, deliver: Callable[[LeaderMessage], None]) -> None:
        while True:
            message, now = await self._mailbox.next(self._coordinator.deadline), clock.now()
            core = self._coordinator
            for answer in core.on_deadline_passed(now) if message is None else core.handle(message, now):
                deliver(answer)

    async def finish(self) -> None:
        """Does nothing: there is no other process to notify."""

    def cut_short(self) -> None:
        """Does nothing: `finish` does not wait."""


# Back ends by name.


class AgentContext(Record):
    """What a store factory gets from the agent.

    Args:
        run_id: the job's name.
        env: the environment of helper processes.
        store: the host of the workers' store (`store.StoreHost`).
        on_endpoint: call this when one of several endpoints changes, with its name and the reason why it does not
            answer, or "" if it answers.
    """

    run_id: str
    env: Mapping[str, str]
    store: Any
    on_endpoint: Callable[[str, str], None] = lambda *_: None


StoreFactory: TypeAlias = "Callable[[RendezvousSettings, AgentContext], Store]"


def _on_etcd(settings: RendezvousSettings, around: AgentContext) -> Store:
    """Returns a store on etcd.  Each store is imported only when a job uses it, so other jobs do not pay for it."""
    from aelastic.rdzv.stores.etcd import etcd_store

    return etcd_store(settings, around.run_id)


def _on_tcp_stores(settings: RendezvousSettings, around: AgentContext) -> Store:
    if settings.has_several_endpoints:
        from aelastic.rdzv.stores.quorum import QuorumStore

        store = QuorumStore(settings, around.run_id, around.env, around.on_endpoint)
        around.store.fork_from(store.fork)
        return store
    if settings.backend == "static":
        from aelastic.rdzv.stores.static import static_store

        return static_store(settings, around.run_id, around.env, around.store)
    from aelastic.rdzv.stores.c10d import C10dStore

    return C10dStore(settings, around.run_id, around.env)


_FACTORIES: dict[str, StoreFactory] = {
    **dict.fromkeys(("c10d", "static"), _on_tcp_stores),
    **dict.fromkeys(("etcd", "etcd-v2", "etcd-v3"), _on_etcd),
}


def register(name: str, factory: StoreFactory) -> None:
    """Registers a store under a name for `RendezvousSettings.backend` (torch: `rendezvous_handler_registry.register`).

    Args:
        name: the new name.
        factory: creates the store of one agent, from the settings and the agent's context.

    Raises:
        InputError: the name is taken.
    """
    if name in _FACTORIES:
        raise InputError(f"rendezvous back end {name} exists already: choose another name")
    _FACTORIES[name] = factory


def names() -> list[str]:
    """Returns the registered names, sorted."""
    return sorted(_FACTORIES)


def factory_of(name: str) -> StoreFactory | None:
    """Returns what creates the stores of a back end; `None` if it is none of ours, so it may be torch's."""
    return _FACTORIES.get(name)
