"""Records torchelastic's events and metrics for torch's listeners (`torch.distributed.elastic.events`, `.metrics`).

The supervisor adds this observer if there may be a listener: `WorkerSpec.event_log_handler` names a handler, or the
program around us uses those modules.  A thread calls the handlers, in order, so a handler that blocks delays only the
end of the run, up to a limit.  Meanwhile events are kept, with their times, up to a limit; also while that thread
imports torch, for which no worker waits.  A handler that raises is reported once.


The events are those that torch's agent records, under its names, with their real times (`torch_events_core.py`).  The
handler `dynamic_rendezvous` is for another kind, the `RdzvEvent`s of torch's dynamic rendezvous.  torch records them
itself, also under aelastic, if its rendezvous is used (`torch:c10d`).  Our rendezvous makes none: the events
`RENDEZVOUS` and `ASSIGN_WORKER_RANKS` have the same information, and go to the chosen handler.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from queue import SimpleQueue
from typing import Any

import anyio

from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.errors import InputError
from aelastic.observe import run_events as ev
from aelastic.observe.observer import CLOSE_TIMEOUT_S, Observer
from aelastic.observe.torch_events_core import Json, Metric, Status, TorchRecord, TorchTranslator, metadata_of
from aelastic.spec import WorkerSpec
from aelastic.workers.states import WorkerState

_log = logging.getLogger(__name__)

# The handlers that torch provides (`events/handlers.py`); a program may have added others.
HANDLERS_OF_TORCH = ("console", "dynamic_rendezvous", "null")
# The group under which torchelastic's own metrics are published.
METRIC_GROUP = "torchelastic"
_EVENTS, _METRICS = "torch.distributed.elastic.events", "torch.distributed.elastic.metrics.api"
# A start of 64 workers makes 80 events, of a few hundred bytes each.
BACKLOG_MAX = 20_000
# As long as the workers' output waits for the console (`logs`); the import of torch is part of it.
FINISH_TIMEOUT_S = 30.0
NAME_LIMIT_S = 1.0


def check_event_log_handler(name: str) -> None:
    """Checks that torch knows the handler; imports torch only for a name that torch does not provide.

    Raises:
        InputError: torch knows no event handler of that name.
    """
    if name in HANDLERS_OF_TORCH:
        return
    try:
        handlers = import_module(f"{_EVENTS}.handlers")
    except (ImportError, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"event log handler {name!r}: torch, which may provide it, cannot be imported: {reason}"
        ) from None
    known = getattr(handlers, "_log_handlers", {})
    if name not in known:
        raise InputError(
            f"event log handler {name!r} is not known to torch: use one of {', '.join(sorted(known))}, "
            f"or add it to {_EVENTS}.handlers first"
        )


class TorchEvents(Observer):
    """torchelastic's events and metrics of one run.

    Args:
        spec: the worker spec.
        run_id: the job's name.
    """

    close_timeout_s = FINISH_TIMEOUT_S + CLOSE_TIMEOUT_S  # `aclose` has its own limit

    def __init__(self, spec: WorkerSpec, run_id: str) -> None:
        self._spec = spec
        self._translator = TorchTranslator(spec.role, spec.max_restarts, clock.now())
        self._recorder = _Recorder(spec, run_id)
        self._queue: SimpleQueue[tuple[int, TorchRecord] | None] = SimpleQueue()
        self._is_over = threading.Event()  # all is recorded, or `aclose` waits no longer
        self._thread: threading.Thread | None = None
        self._happened = self._recorded = 0

    async def open(self) -> None:
        """Prepares for the run; call it before anything is started.

        Raises:
            InputError: the handler does not exist.
        """
        spec = self._spec
        if spec.event_log_handler not in HANDLERS_OF_TORCH:
            await run_sync(check_event_log_handler, spec.event_log_handler)
        if spec.start_method == "fork" and callable(spec.entrypoint):
            # A child forked during an import could never import that module.
            await run_sync(self._recorder.open)
        if self._recorder.is_quick_to_open:
            self._start()

    def tell(self, event: ev.RunEvent, now: float) -> None:
        self._post(self._translator.handle(event, now))
        if isinstance(event, ev.WorkersStarted):
            self._start()  # not earlier: the import of torch would slow down the start of the workers

    async def run(self) -> None:
        """Reports healthy workers as often as torch's agent checks them, if there is a listener for metrics."""
        metrics: Any = sys.modules.get(_METRICS)
        stream_of = getattr(metrics, "getStream", None)  # another thread may be importing it
        if stream_of is None or isinstance(stream_of(METRIC_GROUP).handler, metrics.NullMetricHandler):
            return
        while True:
            await anyio.sleep(self._spec.monitor_interval)
            if self._queue.empty():  # otherwise the handlers are behind already
                self._post(self._translator.look())

    async def fail(self, error: BaseException) -> None:
        """Records that the agent failed before the run began."""
        traceback_ = "".join(traceback.format_exception(error))
        self.tell(ev.RunEnded(WorkerState.UNKNOWN, str(error), traceback=traceback_), clock.now())
        await self.aclose()

    async def aclose(self) -> None:
        """Waits until everything is recorded, or the time is up because a handler blocks."""
        self._queue.put(None)
        self._start()
        try:
            with anyio.CancelScope(shield=True):
                await run_sync(self._is_over.wait, FINISH_TIMEOUT_S)
        finally:
            self._is_over.set()  # ends the thread that waits for it
        if lost := self._happened - self._recorded:
            _log.warning("%d torch events and metrics were dropped: their handlers were too slow", lost)

    def give_up(self) -> None:
        """Makes `aclose` stop waiting."""
        self._is_over.set()

    def _post(self, records: Sequence[TorchRecord]) -> None:
        at_ms = time.time_ns() // 1_000_000
        for each in records:
            self._happened += 1
            if self._queue.qsize() < BACKLOG_MAX:
                self._queue.put((at_ms, each))

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._record, name="torch events", daemon=True)
            thread.start()
            self._thread = thread

    def _record(self) -> None:
        try:
            self._recorder.open()
            while (each := self._queue.get()) is not None:
                self._recorder.record(*each)
                self._recorded += 1
        finally:
            self._is_over.set()


class _Recorder:
    """Calls torch's two modules, in one thread."""

    def __init__(self, spec: WorkerSpec, run_id: str) -> None:
        self._spec = spec
        self._run_id = run_id
        self._events: Any = None
        self._metrics: Any = None
        self._job: Json | None = None
        self._has_warned = False

    @property
    def is_quick_to_open(self) -> bool:
        """Whether torch is already imported, or not needed."""
        return "torch" in sys.modules or self._spec.event_log_handler == "null"

    def open(self) -> None:
        """Imports the modules that have listeners, and looks up the fields that all events share."""
        is_chosen = self._spec.event_log_handler != "null"
        try:
            self._events = import_module(_EVENTS) if is_chosen or _EVENTS in sys.modules else None
            self._metrics = import_module(_METRICS) if is_chosen or _METRICS in sys.modules else None
            if self._events is not None and self._job is None:
                self._job = {
                    "run_id": self._run_id,
                    "role": self._spec.role,
                    "hostname": _host_name(),
                    "rdzv_backend": _backend_of(self._spec),
                }
        except Exception as error:  # noqa: BLE001  importing torch runs whatever is installed
            self._warn("torch events and metrics are not recorded, since torch or the rendezvous handler failed", error)

    def record(self, at_ms: int, item: TorchRecord) -> None:
        try:
            if isinstance(item, Metric):
                if self._metrics is not None:
                    # torch's `put_metric`, with the time of the event.
                    data = self._metrics.MetricData(at_ms / 1000, METRIC_GROUP, item.name, item.value)
                    self._metrics.getStream(METRIC_GROUP).handler.emit(data)
            elif self._events is not None and self._job is not None:
                name = self._spec.get_entrypoint_name()
                entry_point = name.rpartition("/")[2] if isinstance(self._spec.entrypoint, str) else name
                metadata = metadata_of(item, entry_point, self._job)
                event = self._events.Event(item.name, self._events.EventSource[item.source], at_ms, metadata)
                self._events.record(event, self._spec.event_log_handler)
        except Exception as error:  # noqa: BLE001  handlers are the user's
            what = f"event {item.name}" if isinstance(item, Status) else f"metric {item.name}"
            self._warn(f"a handler failed with {what}; further failures are not logged", error)

    def _warn(self, what: str, error: Exception) -> None:
        if not self._has_warned:
            _log.warning("%s: %s: %s", what, type(error).__name__, error)
        self._has_warned = True


@cache
def _host_name() -> str:
    """Returns the host name as in torch or, if that is not known in time, without its domain.

    A name server may not answer; and in a forked child, a lock of the C library stays held if a thread of the parent
    was looking up a name.
    """
    name, found = socket.gethostname(), list[str]()
    thread = threading.Thread(target=lambda: found.append(socket.getfqdn(name)), name="host name", daemon=True)
    thread.start()
    thread.join(NAME_LIMIT_S)
    return found[0] if found else name


def _backend_of(spec: WorkerSpec) -> str:
    """Returns the backend that torchrun would use: it has a rendezvous even for a single node."""
    if spec.rdzv_handler is not None:
        get_backend = getattr(spec.rdzv_handler, "get_backend", None)
        return "" if get_backend is None else str(get_backend())
    if spec.rdzv is not None:
        return spec.rdzv.backend.removeprefix("torch:")
    return "static" if spec.master_port is not None else "c10d"
