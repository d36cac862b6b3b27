"""The blocking calls into torch's rendezvous, and the one thread that makes them.

torch's errors become this package's.  Nothing is decided here, but in `torch_handler_link.py`.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import anyio

from aelastic.errors import (
    AelasticError,
    InputError,
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from aelastic.rdzv.protocol.messages import Assigned, Node
from aelastic.rdzv.protocol.ranks import NodeRanks

_log = logging.getLogger(__name__)

T = TypeVar("T")

# torch's handlers wake up every second, so a handler gives up within that time.
END_TIMEOUT_S = 2.0
STORE_TIMEOUT_S = 10.0
# Private parts of torchelastic: agents agree because they run the same code.
_AGENT = "torch.distributed.elastic.agent.server.api"
_ASSIGN_RANKS = f"{_AGENT}:SimpleElasticAgent._assign_worker_ranks"
_BARRIER_PREFIX = f"{_AGENT}:_TERMINAL_STATE_SYNC_ID"
_ENTER_BARRIER = "torch.distributed.elastic.utils.store:_barrier_nonblocking"


class HandlerCalls:
    """torch's blocking calls; the arguments are those of `TorchHandlerLink`."""

    def __init__(
        self, open_handler: Callable[[], Any], master_addr: str | None, master_port: int | None, local_addr: str | None
    ) -> None:
        self._open_handler = open_handler
        self._master_addr, self._master_port = master_addr, master_port
        self._local_addr = local_addr
        self._handler: Any = None
        self._store: Any = None  # of the round, for the agents
        self._group_world_size = 0
        self._barrier_prefix = ""
        self._enter: Any = None

    def next_round(self, node: Node, round_: int, restart_count: int) -> Assigned:
        """Blocks until a round is complete and its nodes have agreed on their ranks."""
        with _errors_of("opened", InputError):
            # Look them all up now: a running job must not fail because one is missing.
            assign, self._barrier_prefix, self._enter = map(_part, (_ASSIGN_RANKS, _BARRIER_PREFIX, _ENTER_BARRIER))
            if self._handler is None:
                self._handler = self._open_handler()
        with _errors_of("joined"):
            info = self._handler.next_rendezvous()
            self._store, self._group_world_size = info.store, info.world_size
            master_addr, master_port, store_server = self._master(info)
            if store_server == "rendezvous":  # at the handler's own address, not the one that workers use
                where = info.bootstrap_store_info
                _empty_workers_store(self._handler, where.master_addr, where.master_port)
            # These are the only fields of torch's `WorkerSpec` that it reads; it reads none of the agent.
            spec = SimpleNamespace(role=node.role, local_world_size=node.local_world_size)
            first = assign(None, info.store, info.rank, info.world_size, spec)[0]
        ranks = NodeRanks(
            group_rank=info.rank,
            group_world_size=info.world_size,
            first_rank=first.global_rank,
            world_size=first.world_size,
            first_role_rank=first.role_rank,
            role_world_size=first.role_world_size,
            local_world_size=node.local_world_size,
        )
        return Assigned(round_, restart_count, ranks, master_addr, master_port, store_server=store_server)

    def _master(self, info: Any) -> tuple[str, int, str]:
        where = info.bootstrap_store_info
        store_server = "rendezvous" if where is not None and self._handler.use_agent_store else "worker"
        if where is None:  # torchrun fails here, though torch has a way to agree on an address
            where = _part("torch.distributed.elastic.rendezvous:RendezvousStoreInfo").build(
                info.rank, info.store, self._local_addr
            )
        return self._master_addr or where.master_addr, self._master_port or where.master_port, store_server

    def num_nodes_waiting(self) -> int:
        with _errors_of("asked"):
            return int(self._handler.num_nodes_waiting())

    def enter_barrier(self) -> str:
        """Reports that this node has finished.  Returns the key that exists once all have."""
        with _errors_of("told"):
            key = self._enter(store=self._store, world_size=self._group_world_size, key_prefix=self._barrier_prefix)
            return str(key)

    def has_come(self, key: str) -> bool:
        # torch's own barrier would also block the handler's heartbeats, which share the store's connection.
        with _errors_of("asked"):
            return bool(self._store.check([key]))

    def shutdown(self) -> None:
        with _errors_of("closed"):
            self._handler.shutdown()

    def forget(self) -> None:
        """Releases the handler without closing the rendezvous for others."""
        # Otherwise this node would seem alive to the others while something holds the handler.
        stop_heartbeats = getattr(self._handler, "_stop_heartbeats", None)
        if stop_heartbeats is not None:
            stop_heartbeats()
        self._handler = self._store = None


def _part(path: str) -> Any:
    """Returns a part of torch.

    Raises:
        InputError: this version of torch does not have it.
    """
    module, _, names = path.partition(":")
    found: Any = importlib.import_module(module)
    for name in names.split("."):
        found = getattr(found, name, None)
        if found is None:
            version = importlib.import_module("torch").__version__
            raise InputError(
                f"torch {version} has no {path}, which this back end needs: use one of aelastic's own back ends"
            )
    return found


def _empty_workers_store(handler: Any, master_addr: str, master_port: int) -> None:
    """Deletes the keys that workers of earlier rounds wrote.

    torch's handler serves one store for all rounds.  New workers find the addresses of dead ones in it, and
    fail (pytorch#135712): torchrun alone does not survive a restart with gloo.  No worker uses that store now: the last
    round's workers are gone, and the next ones start once all nodes, including this one, have agreed on ranks.
    """
    if not isinstance(
        handler, _part("torch.distributed.elastic.rendezvous.dynamic_rendezvous:DynamicRendezvousHandler")
    ):
        return  # the agents may use that store themselves
    # torch's agent reads this variable as well.  If it is set, nodes exchange nothing to agree on ranks, so other
    # workers may have started.
    if os.environ.get("TORCH_ELASTIC_WORKER_IDENTICAL") == "1":  # noqa: TID251
        return
    try:
        connect = _part("torch.distributed:TCPStore")
        store = connect(master_addr, master_port, is_master=False, timeout=timedelta(seconds=STORE_TIMEOUT_S))
        for key in store.list_keys():
            store.delete_key(key)
    except AttributeError:
        _log.warning(
            "could not empty the workers' store, so restarted workers may fail: the TCPStore of this torch cannot list "
            "its keys: use torch 2.13 or newer",
            extra={"topic": "the-job-runs-through-the-rendezvous-of-torch"},
        )
    except RuntimeError as error:
        _log.warning(
            "could not empty the workers' store, so restarted workers may fail: %s",
            error,
            extra={"topic": "the-job-runs-through-the-rendezvous-of-torch"},
        )


class NotAdmitted(RendezvousError):
    """The job ended while this node waited as a spare."""


class HandlerExit(RendezvousError):
    """The handler asked this program to end: `SystemExit`, `KeyboardInterrupt`, or an exception of that kind."""


# By name, so that it does not matter which modules of torch could be imported.
_OURS: dict[str, type[AelasticError]] = {
    "RendezvousClosedError": RendezvousClosedError,
    "RendezvousTimeoutError": RendezvousTimeoutError,
    "RendezvousConnectionError": RendezvousConnectionError,
    "RendezvousStateError": RendezvousStateError,
    "RendezvousGracefulExitError": NotAdmitted,
    "DistError": RendezvousConnectionError,
}


class _GiveUp(BaseException):  # so that no handler mistakes it for its own error
    """Raised in the thread, in the middle of a call that no task waits for any more."""


@contextmanager
def _errors_of(what: str, otherwise: type[AelasticError] = RendezvousError) -> Iterator[None]:
    """Turns torch's errors into this package's."""
    try:
        yield
    except (AelasticError, _GiveUp):
        raise
    except Exception as error:
        names = [cls.__name__ for cls in type(error).__mro__ if cls.__module__.startswith("torch.")]
        ours = next((_OURS[name] for name in names if name in _OURS), otherwise)
        text = f"{type(error).__name__}: {error}"
        if error.__cause__ is not None:  # torch says "See inner exception for details"
            text = f"{text} ({error.__cause__})"
        raise ours(f"torch's rendezvous cannot be {what}: {text}") from error
    except BaseException as error:  # it would end only this thread
        raise HandlerExit(f"torch's rendezvous cannot be {what}: its handler raised {error!r}") from error


# The thread.


class CallThread:
    """One thread for all calls, one at a time: handlers do not support more.

    It is a daemon, not one of anyio's threads: the interpreter's exit does not wait for a call that blocks for minutes.

    Args:
        at_end: called last, in the thread.
    """

    def __init__(self, at_end: Callable[[], None]) -> None:
        self._at_end = at_end
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_busy = False
        self._busy = threading.Lock()  # held while a running job is given up, so that it cannot end meanwhile

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Runs a function in the thread.  If this is cancelled, the function continues; the next call waits for it."""
        answer: Future[T] = Future()

        def job() -> None:
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(function(*args))
            except Exception as error:  # noqa: BLE001  raised again in the waiting task
                answer.set_exception(error)

        self._jobs.put(job)
        if self._thread is None:
            self._ended, loop = anyio.Event(), asyncio.get_running_loop()
            self._thread = threading.Thread(target=self._main, args=(loop,), name="torch rendezvous", daemon=True)
            self._thread.start()
        return await asyncio.wrap_future(answer)

    async def stop(self) -> None:
        """Ends the thread, or leaves it behind if it blocks where Python cannot reach it."""
        if self._thread is None or self._thread.ident is None:
            return
        self._jobs.put(None)
        with self._busy:
            if self._is_busy:
                ident = ctypes.c_ulong(self._thread.ident)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(_GiveUp))
                self._is_busy = False
        with anyio.move_on_after(END_TIMEOUT_S):
            await self._ended.wait()

    def _main(self, loop: asyncio.AbstractEventLoop) -> None:
        try:
            with suppress(_GiveUp):
                while (job := self._jobs.get()) is not None:
                    self._is_busy = True
                    job()
                    with self._busy:  # the exception arrives here at the latest, never while the thread ends
                        self._is_busy = False
        finally:
            self._at_end()
            with suppress(RuntimeError):  # the loop is closed: no task waits any more
                loop.call_soon_threadsafe(self._ended.set)
