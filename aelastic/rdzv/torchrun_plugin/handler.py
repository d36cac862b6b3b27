"""torch's own dynamic rendezvous, with its state and the agents' store on etcd v3.

It is on torch's documented interface: a `RendezvousBackend` and a `Store` for `create_handler`, and a
`RendezvousHandler` around what that gives.  So which nodes take part, in which order, and when a round is complete is
decided by torch.  This handler differs in three things:

- The workers' store is new in each round.  torch keeps the one of a node's first round and does not publish it again:
  a node that joins later waits for its address in vain, a node whose rank changes sends its workers elsewhere than the
  others, and new workers find the addresses of dead ones (pytorch#135712).
- While etcd cannot be reached running workers are left alone, and a node that joins waits for it, up to `PATIENCE_S`.
- Errors say what to do.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import anyio
from torch.distributed import (  # type: ignore[attr-defined]  # exported, though not in the way mypy asks for
    DistNetworkError,
    DistStoreError,
    Store,
)
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend, create_handler

from aelastic import errors
from aelastic.rdzv.boards.etcd_http import NoSuchApiError
from aelastic.rdzv.settings import RendezvousSettings
from aelastic.rdzv.torchrun_plugin.keys import PATIENCE_S, JobKeys, patiently
from aelastic.rdzv.torchrun_plugin.keys_thread import KeysThread

_log = logging.getLogger(__name__)

T = TypeVar("T")

NAME = "etcd-v3"
# How long a closed run id stays closed: for nodes that come late.  torch's `etcd-v2` takes two hours.
DEFAULT_TTL_S = 60
# For a server that does not answer yet: not as long as later, since the endpoint may be mistyped.
OPEN_PATIENCE_S = 5.0
# An election of etcd's takes 1 s unless it is set up otherwise, and a lease lasts for 1.5 of them at least.
MIN_TTL_S = 2


class EtcdV3Handler(RendezvousHandler):
    """torch's rendezvous on etcd v3.

    Args:
        parameters: an endpoint, or several separated by commas; of the configuration what torch's own dynamic
            rendezvous takes, what `etcd_settings.py` says, and `ttl`: for how many seconds etcd keeps what belongs to
            this job after its last agent.

    Raises:
        ValueError: a setting that cannot work; says which and what to do.
        torch's RendezvousConnectionError: etcd does not answer there, or not in its v3 API.
    """

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._ttl_s = _ttl_s(parameters)
        self._thread = KeysThread(partial(JobKeys, _settings(parameters), parameters.run_id, self._ttl_s))
        self._stop_thread = weakref.finalize(self, self._thread.stop)  # for programs that drop it without `shutdown`
        self._backend = EtcdV3Backend(self._thread)
        self._rendezvous = create_handler(EtcdV3Store(self._thread), self._backend, parameters)
        self._is_reachable = True
        try:
            with _errors_of_torch():
                self._thread.call(_patiently, JobKeys.state, (), OPEN_PATIENCE_S)
        except BaseException:
            self._thread.stop()
            raise

    def get_backend(self) -> str:
        return NAME

    def get_run_id(self) -> str:
        return self._rendezvous.get_run_id()

    @property
    def use_agent_store(self) -> bool:
        return self._rendezvous.use_agent_store

    def next_rendezvous(self) -> RendezvousInfo:
        last_workers_store = self._forget_workers_store()
        try:
            with self._backend.patient():
                return self._rendezvous.next_rendezvous()
        except RendezvousClosedError:
            raise RendezvousClosedError(
                f"the rendezvous of run id {self.get_run_id()} is closed, since its job has ended: use another "
                f"--rdzv-id, or wait until etcd forgets it, {self._ttl_s} s after its last agent"
            ) from None
        finally:
            # Not before: until they are in the next round, others may have workers that use it.
            del last_workers_store

    def _forget_workers_store(self) -> object:
        """Makes torch's handler set up another one in the next round, and tell all nodes of that; gives the last one.

        These two fields are private.  A torch that calls them otherwise does as it does with its own back ends.
        """
        rendezvous = self._rendezvous
        last = getattr(rendezvous, "_shared_tcp_store_server", None)
        rendezvous._bootstrap_store_info = rendezvous._shared_tcp_store_server = None  # noqa: SLF001
        return last

    def num_nodes_waiting(self) -> int:
        """How many nodes wait for the next round; as far as we know, none while etcd cannot be reached."""
        try:
            count = self._rendezvous.num_nodes_waiting()
        except RendezvousConnectionError as error:
            if self._is_reachable:
                _log.warning("etcd does not answer; the workers continue: %s", error)
            self._is_reachable = False
            return 0
        self._is_reachable = True
        return count

    def is_closed(self) -> bool:
        return self._rendezvous.is_closed()

    def set_closed(self) -> None:
        self._rendezvous.set_closed()

    def shutdown(self) -> bool:
        """Closes the rendezvous, for nodes that come late, and lets go of etcd."""
        try:
            return self._rendezvous.shutdown()
        finally:
            self._thread.stop()

    def _stop_heartbeats(self) -> None:
        # As torch's handler has it: an agent of ours that leaves a job asks for it.
        self._rendezvous._stop_heartbeats()  # noqa: SLF001


def _settings(parameters: RendezvousParameters) -> RendezvousSettings:
    """What the user chose, with the names that our own boards give it."""
    with _errors_of_torch():
        settings = RendezvousSettings(
            backend=NAME,
            endpoint=parameters.endpoint,
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            config={name: str(value) for name, value in parameters.config.items() if value is not None},
        )
        JobKeys(settings, parameters.run_id, DEFAULT_TTL_S)  # reads the files that are named there
        return settings


def _ttl_s(parameters: RendezvousParameters) -> int:
    text = parameters.get("ttl", DEFAULT_TTL_S)
    try:
        ttl_s = math.ceil(float(text))
    except (TypeError, ValueError, OverflowError):
        ttl_s = 0
    if ttl_s < MIN_TTL_S:
        raise ValueError(f"rendezvous setting ttl={text}: use a number of seconds, {MIN_TTL_S} or more")
    return ttl_s


class EtcdV3Backend(RendezvousBackend):
    """torch's rendezvous state, as one key."""

    def __init__(self, thread: KeysThread) -> None:
        self._thread = thread
        self._patience_s = 0.0

    @property
    def name(self) -> str:
        return NAME

    def get_state(self) -> tuple[bytes, Any] | None:
        return self._call(JobKeys.state)

    def set_state(self, state: bytes, token: Any | None = None) -> tuple[bytes, Any, bool] | None:
        return self._call(JobKeys.write_state, state, token)

    @contextmanager
    def patient(self) -> Iterator[None]:
        """While etcd cannot be reached its calls wait, `PATIENCE_S` long."""
        self._patience_s = PATIENCE_S
        try:
            yield
        finally:
            self._patience_s = 0.0

    def _call(self, method: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        # Of a job that runs: a heartbeat that fails with any other is torch's end.
        with _errors_of_torch(refused=RendezvousConnectionError):
            return self._thread.call(_patiently, method, args, self._patience_s)


class EtcdV3Store(Store):
    """The store of torchrun's agents (not of their workers): a few keys in each round.

    What torch leaves to a store of one's own: anything else raises `NotImplementedError`.
    """

    timeout: timedelta  # torch's, as `set_timeout` has it

    def __init__(self, thread: KeysThread) -> None:
        super().__init__()
        self._thread = thread

    def set(self, key: str, value: str | bytes) -> None:
        self._call(f"{key} could not be set", JobKeys.put, key, _to_bytes(value))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._call(f"{', '.join(keys)} did not come", JobKeys.get, keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self._call(f"{key} could not be added to", JobKeys.add, key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._call(f"{', '.join(keys)} did not come", JobKeys.wait, keys, timeout=timeout)

    def check(self, keys: Sequence[str]) -> bool:
        return self._call(f"{', '.join(keys)} could not be looked for", JobKeys.has, keys)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        expected, desired = _to_bytes(expected_value), _to_bytes(desired_value)
        return self._call(f"{key} could not be set", JobKeys.compare_set, key, expected, desired)

    def delete_key(self, key: str) -> bool:
        return self._call(f"{key} could not be deleted", JobKeys.delete, key)

    def num_keys(self) -> int:
        return self._call("the keys could not be counted", JobKeys.count)

    # By these names torch's `PrefixStore` looks for the two.
    deleteKey, getNumKeys = delete_key, num_keys  # noqa: N815

    def _call(
        self, failed: str, method: Callable[..., Coroutine[Any, Any, T]], *args: Any, timeout: timedelta | None = None
    ) -> T:
        limit_s = (timeout or self.timeout).total_seconds()
        try:
            return self._thread.call(_within, limit_s, method, args)
        except TimeoutError:
            raise DistStoreError(f"{failed} within {limit_s:g} s") from None
        except errors.AelasticError as error:
            raise DistNetworkError(f"{failed}: {error}") from None


async def _patiently(
    keys: JobKeys, method: Callable[..., Coroutine[Any, Any, T]], args: Sequence[Any], patience_s: float
) -> T:
    return await patiently(lambda: method(keys, *args), patience_s)


async def _within(
    keys: JobKeys, limit_s: float, method: Callable[..., Coroutine[Any, Any, T]], args: Sequence[Any]
) -> T:
    with anyio.fail_after(limit_s):
        return await _patiently(keys, method, args, PATIENCE_S)


@contextmanager
def _errors_of_torch(refused: type[Exception] = ValueError) -> Iterator[None]:
    """Turns what we raise into what torch's agents expect.

    Args:
        refused: for what the user has to change.
    """
    try:
        yield
    except errors.InputError as error:
        raise refused(str(error)) from None
    except (errors.RendezvousConnectionError, NoSuchApiError) as error:
        raise RendezvousConnectionError(str(error)) from None
    except errors.RendezvousError as error:
        raise RendezvousStateError(str(error)) from None


def _to_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
