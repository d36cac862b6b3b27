"""The store of several endpoints: one cell in as many TCPStores, which works while a majority of them answers.

Each agent serves at most one of the endpoints, if it is on the host of one that is free, and is a client of all others.
The endpoints are asked in parallel, each by its own task (`run`).  If one hangs, only its task waits; the operation
ends with the answers of the others.  `rdzv/stores/register.py` decides; the order of the list does not matter.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

import anyio

from aelastic.base.loop import clock
from aelastic.base.loop.mailbox import Mailbox
from aelastic.errors import InputError, RendezvousConnectionError, RendezvousError, RendezvousStateError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.stores import register_events as ev
from aelastic.rdzv.stores.c10d import C10dStore, other_list
from aelastic.rdzv.stores.endpoints import Endpoint
from aelastic.rdzv.stores.register import LIMIT_S, Register
from aelastic.rdzv.stores.register_cells import MARK, StoreCell, cell_from_bytes, cell_to_bytes
from aelastic.rdzv.stores.store import Store
from aelastic.workers.tcpstore.template import StoreTemplate

_log = logging.getLogger(__name__)

SILENT = "no answer"
EMPTY = "came back empty"


class QuorumStore(Store):
    """The cell of one run id in several TCPStores.

    Args:
        settings: `endpoint` is a list; the rest is as for `C10dStore`.
        run_id: the job's name.
        env: the environment of the child processes.
        on_endpoint: called with an endpoint whose state has changed, and why it is missing, or "" if it answers.

    Raises:
        InputError: a value cannot work.
    """

    def __init__(
        self,
        settings: RendezvousSettings,
        run_id: str,
        env: Mapping[str, str],
        on_endpoint: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        self._endpoints = sorted(str(Endpoint(*each)) for each in settings.endpoints)
        self._template = StoreTemplate(env)
        self.fork = self._template.fork  # forks a process that has imported torch's store
        self._parts = [
            C10dStore(
                replace(settings, endpoint=name), run_id, env,
                is_one_of_many=True, may_serve=partial(self._is_free_for, store), fork=self.fork,
            )
            for store, name in enumerate(self._endpoints)
        ]  # fmt: skip
        self._backend = settings.backend
        self._states = dict.fromkeys(self._endpoints, SILENT)  # why each is missing; "": it answers
        self._reported: dict[str, str] = {}
        self._on_endpoint = on_endpoint
        self._hopeless: RendezvousError | InputError | None = None  # why this agent cannot take part, if so
        self._has_worked = False  # once it has, an endpoint with another server is treated like one that is away
        limit_s = min(LIMIT_S, settings.lease_s / 2)
        count = len(self._endpoints)
        self._register = Register(count, os.urandom(8).hex(), limit_s)
        self._mailbox: Mailbox[ev.Event] = Mailbox()
        self._lock = anyio.Lock()  # one operation at a time
        self._is_one_back = anyio.Event()
        self._requests = [_Slot() for _ in self._parts]
        if count % 2 == 0:
            _log.warning(
                "%d rendezvous endpoints survive the loss of %d, no more than %d do: use an odd number",
                count, (count - 1) // 2, count - 1,
            )  # fmt: skip

    async def run(self) -> None:
        async with anyio.create_task_group() as tasks:
            for store in range(len(self._parts)):
                tasks.start_soon(self._attend, store, name=f"rendezvous endpoint {store}")
            tasks.start_soon(self._take_in, name="rendezvous endpoints that come back")

    async def _take_in(self) -> None:
        """Reads when an endpoint begins to answer, so that an empty one is included at once, before another is lost."""
        while True:
            await self._is_one_back.wait()
            self._is_one_back = anyio.Event()
            with suppress(RendezvousError, InputError):
                await self._ask(ev.Requested())

    # The cell.

    async def open(self) -> None:
        """Does nothing: each operation connects to the endpoints, or serves one of them."""

    async def get(self) -> bytes:
        return await self._insist(ev.Requested())

    async def compare_set(self, expected: bytes, new: bytes) -> bytes:
        return await self._insist(ev.Requested(expected, new))

    async def _insist(self, asked: ev.Requested) -> bytes:
        is_one_back = self._is_one_back
        try:
            return await self._ask(asked)
        except RendezvousConnectionError:
            if not is_one_back.is_set():
                raise
            # Other endpoints that had refused may have come up in the meantime, as this one did.
            return await self._ask(asked)

    async def _ask(self, asked: ev.Requested) -> bytes:
        async with self._lock:
            return await self._operate(asked)

    async def _operate(self, asked: ev.Requested) -> bytes:
        register = self._register
        actions = register.handle(asked, clock.now())
        try:
            while True:
                for action in actions:
                    match action:
                        case ev.Done(text):
                            if self._hopeless is not None and not self._has_worked:
                                raise self._hopeless
                            self._has_worked = True
                            return text
                        case ev.NoMajority():
                            raise self._no_majority(action)
                        case ev.Look() | ev.Write():
                            self._requests[action.store].put(action)
                event = await self._mailbox.next(register.deadline) or ev.DeadlinePassed()
                actions = register.handle(event, clock.now())
        finally:
            register.handle(ev.Dropped(), clock.now())

    def _no_majority(self, answer: ev.NoMajority) -> RendezvousError | InputError:
        if self._hopeless is not None and not self._has_worked:
            return self._hopeless
        for store in answer.missing:
            self._note(self._endpoints[store], self._states[self._endpoints[store]] or SILENT)
        for store in answer.forgetful:
            self._note(self._endpoints[store], EMPTY)
        missing = [f"{name} ({why})" for name, why in self._states.items() if why]
        return RendezvousConnectionError(
            f"{len(missing)} of {len(self._parts)} rendezvous endpoints are missing, and {self._register.majority} are "
            f"needed: {', '.join(missing)}"
        )

    # One endpoint.

    async def _attend(self, store: int) -> None:
        while True:
            request = await self._requests[store].take()
            name = self._endpoints[store]
            try:
                answer = await self._carry_out(request)
                state = ""
            except (RendezvousError, InputError) as error:
                state = error.reason if isinstance(error, RendezvousConnectionError) else str(error)
                answer = ev.Unanswered(request.step, store, state)
                if isinstance(error, InputError | RendezvousStateError):
                    self._hopeless = self._hopeless or error
                    if self._has_worked and self._states[name] != state:  # otherwise this agent ends, and reports it
                        _log.warning("%s", error)
            if self._states[name] and not state:
                self._is_one_back.set()
            self._note(name, state)
            self._mailbox.post(answer)

    def _note(self, name: str, state: str) -> None:
        self._states[name] = state
        if self._reported.get(name) != state:
            self._reported[name] = state
            self._on_endpoint(name, state)

    async def _carry_out(self, request: ev.Look | ev.Write) -> ev.Event:
        part = self._parts[request.store]
        if isinstance(request, ev.Look):
            cell = self._cell_of(await part.get_once(), self._endpoints[request.store])
            return ev.Looked(request.step, request.store, cell)
        expected = cell_to_bytes(request.expected, self._endpoints) if request.expected else b""
        new = cell_to_bytes(request.cell, self._endpoints)
        return ev.Written(request.step, request.store, await part.compare_set_once(expected, new) == new)

    def _is_free_for(self, store: int) -> bool:
        """Returns whether this agent may serve an endpoint: if it served two, both would be lost together."""
        return not any(part.is_served_here for other, part in enumerate(self._parts) if other != store)

    def _cell_of(self, data: bytes, endpoint: str) -> StoreCell | None:
        if not data:
            return None
        if not data.startswith(MARK):  # written by an agent that has only this endpoint
            raise other_list(self._endpoints, [endpoint])
        try:
            cell, endpoints = cell_from_bytes(data)
        except ValueError as error:
            raise InputError(
                f"{self.name}: agents of this run have different endpoints ({error}): use the same list on every node",
                topic="the-agents-have-different-endpoints",
            ) from None
        if endpoints != self._endpoints:
            raise other_list(self._endpoints, endpoints)
        return cell

    async def aclose(self) -> None:
        async with anyio.create_task_group() as tasks:
            for part in self._parts:
                tasks.start_soon(part.aclose)
        await self._template.aclose()

    @property
    def name(self) -> str:
        return f"{self._backend} at {','.join(self._endpoints)}"

    @property
    def own_address(self) -> str:
        return next((part.own_address for part in self._parts if part.own_address), "")

    @property
    def endpoint_host(self) -> str:
        hosts = [part.endpoint_host for part in sorted(self._parts, key=lambda part: not part.is_served_here)]
        return next((host for host in hosts if host), "")

    @property
    def is_served_here(self) -> bool:
        return any(part.is_served_here for part in self._parts)


class _Slot:
    """The next request for an endpoint: a newer one replaces one that has not begun."""

    def __init__(self) -> None:
        self._request: ev.Look | ev.Write | None = None
        self._is_there = anyio.Event()

    def put(self, request: ev.Look | ev.Write) -> None:
        self._request = request
        self._is_there.set()

    async def take(self) -> ev.Look | ev.Write:
        await self._is_there.wait()
        assert self._request is not None
        request, self._request, self._is_there = self._request, None, anyio.Event()
        return request
