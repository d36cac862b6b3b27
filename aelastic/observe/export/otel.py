"""Sends rounds and restarts as OpenTelemetry traces (the extra `otel`), by OTLP over HTTP.

A run has one trace for all of its nodes: its id follows from the run id.  Each node has a span `run`, which holds one
span for each round, with the phases of that round, and one for each restart, from the first worker's end until all run
again.  Failures are events of the round's span.

The SDK is imported in a thread once the run has begun; what happens before waits for it.  A collector that is away, or
refuses, costs one warning; the SDK's own words about it are dropped, those of other exporters in this program are not.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from aelastic.base.loop import clock
from aelastic.base.loop.threads import run_sync
from aelastic.observe import run_events as ev
from aelastic.observe.observer import Observer

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.trace import Span, Tracer

_log = logging.getLogger(__name__)

# The SDK's variables for where to send; the one for traces comes first.
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_EXPORTER = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
# Attributes of a round's span, and of a recovery in place, named as in the run events.
_OF_ROUND = "round", "generation", "restart_count", "group_rank", "group_world_size", "world_size", "in_place"
_OF_RECOVERY = "workers_kept", "workers_replaced", "step", "source_rank", "duration_s"
# How many events wait for the SDK's import, which takes about a second.
WAITING_MAX = 1000


def traces_of(env: Mapping[str, str]) -> Traces | None:
    """Returns the observer that traces a run, if the environment names a collector and the SDK is installed."""
    if not any(env.get(name) for name in ENDPOINTS) or env.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":
        return None
    if env.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if find_spec("opentelemetry") is None or find_spec(_EXPORTER) is None:
        _log.info(
            "the OpenTelemetry SDK is not installed, so no traces are sent: "
            "pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http"
        )
        return None
    return Traces(env.get("OTEL_SERVICE_NAME") or "aelastic")


class Traces(Observer):
    """The traces of one run.

    Args:
        service: the name of the service, as the collector shows it.
    """

    close_timeout_s = 3.0  # to send the rest

    def __init__(self, service: str) -> None:
        self._service = service
        self._waiting: list[tuple[ev.RunEvent, float]] | None = []  # for the SDK; `None` once it is imported
        self._provider: TracerProvider | None = None
        self._spans: _Spans | None = None

    def tell(self, event: ev.RunEvent, now: float) -> None:
        if self._spans is not None:
            self._spans.tell(event, now)
        elif self._waiting is not None and len(self._waiting) < WAITING_MAX:
            self._waiting.append((event, now))

    async def run(self) -> None:
        self._open(await run_sync(self._load, abandon_on_cancel=True))

    async def aclose(self) -> None:
        if self._provider is None:  # the run was over before the import
            self._open(await run_sync(self._load, abandon_on_cancel=True))
        assert self._provider is not None
        await run_sync(self._provider.shutdown, abandon_on_cancel=True)

    def _load(self) -> Resource:
        """Imports the SDK and runs its resource detectors, in a thread, because this may take seconds."""
        import_module(_EXPORTER)
        from opentelemetry.sdk.resources import Resource

        return Resource.create({"service.name": self._service})

    def _open(self, resource: Resource) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

        waiting, self._waiting = self._waiting or [], None
        began = next((event for event, _ in waiting if isinstance(event, ev.RunBegan)), None)
        ids = RandomIdGenerator()
        if began is not None:
            digest = hashlib.sha256(began.run_id.encode(errors="replace")).digest()
            ids.generate_trace_id = lambda: int.from_bytes(digest[:16])
        # Not the process's own provider: the program around us may have one.
        self._provider = TracerProvider(id_generator=ids, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_Exporter()))
        offset_ns = time.time_ns() - int(clock.now() * 1e9)
        self._spans = _Spans(self._provider.get_tracer("aelastic"), offset_ns)
        for event, now in waiting:
            self._spans.tell(event, now)


class _Spans:
    """Turns run events into spans.

    Args:
        tracer: the SDK's tracer.
        offset_ns: how far wall time is ahead of the events' clock.
    """

    def __init__(self, tracer: Tracer, offset_ns: int) -> None:
        self._tracer = tracer
        self._offset_ns = offset_ns
        self._run: Span | None = None
        self._round: Span | None = None
        self._restart: Span | None = None
        self._failed_at: float | None = None  # the first worker of this round

    def tell(self, event: ev.RunEvent, now: float) -> None:  # noqa: C901, PLR0912  one case for each
        named: dict[str, Any]
        match event:
            case ev.RunBegan():
                named = {"run_id": event.run_id, "node": event.node_id, "host.name": event.host, "role": event.role}
                self._run = self._start("run", None, now, {**named, "entrypoint": event.entrypoint})
            case ev.RoundFormed():
                self._end(self._round, now)
                named = {name: getattr(event, name) for name in _OF_ROUND}
                self._round = self._start(f"round {event.round}", self._run, now, named)
            case ev.PhaseTook(name, duration_s, local_rank):
                begins = now - duration_s
                if name == "detect" and self._failed_at is None:
                    self._failed_at = begins
                more = {} if local_rank is None else {"local_rank": local_rank}
                self._end(self._start(name, self._round or self._run, begins, more), now)
            case ev.WorkerEnded(failure=failure, rank=rank) if failure is not None:
                self._failed_at = now if self._failed_at is None else self._failed_at
                named = {"rank": rank, "exit_code": failure.exitcode, "exception.message": failure.message}
                self._note("worker failed", named, now, is_error=True)
            case ev.Noticed(rank=rank, by=by, reason=reason):
                self._note("noticed", {"rank": rank, "by": by, "reason": reason}, now)
            case ev.Compared(_, text, outliers):
                self._note("compared", {"reason": text, "ranks": outliers}, now)
            case ev.Restarting() if self._restart is None:
                named = {"cause": event.cause, "reason": event.reason, "restart_count": event.restart_count}
                named["in_place"] = event.in_place
                begins = now if self._failed_at is None else self._failed_at
                self._restart = self._start("restart", self._run, begins, named)
            case ev.WorkersStarted():
                self._end(self._restart, now)
                self._restart = self._failed_at = None
            case ev.Recovered():
                self._note("recovered", {name: getattr(event, name) for name in _OF_RECOVERY}, now)
            case ev.NotRecovered(reason=reason):
                self._note("not recovered", {"reason": reason}, now)
                if self._restart is not None:
                    self._restart.set_attribute("in_place", False)
            case ev.RunEnded(state=state, reason=reason, cause=cause):
                self._note("run ended", {"state": state.value, "reason": reason}, now, is_error=cause is not None)
                for span in (self._restart, self._round, self._run):
                    self._end(span, now)
            case _:
                pass

    def _at(self, now: float) -> int:
        return int(now * 1e9) + self._offset_ns

    def _start(self, name: str, parent: Span | None, now: float, attributes: Mapping[str, Any]) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        context = Context() if parent is None else set_span_in_context(parent, Context())
        return self._tracer.start_span(name, context, attributes=attributes, start_time=self._at(now))

    def _end(self, span: Span | None, now: float) -> None:
        if span is not None and span.is_recording():
            span.end(self._at(now))

    def _note(self, name: str, attributes: Mapping[str, Any], now: float, *, is_error: bool = False) -> None:
        from opentelemetry.trace import Status, StatusCode

        for span in (self._round, self._run):
            if span is not None and span.is_recording():
                span.add_event(name, attributes, self._at(now))
                if is_error:
                    span.set_status(Status(StatusCode.ERROR, str(attributes.get("exception.message", name))))
                return


class _Exporter:
    """The SDK's exporter, whose failures we log once."""

    def __init__(self) -> None:
        exporter = import_module(_EXPORTER)
        self._inner: Any = exporter.OTLPSpanExporter()
        self._has_warned = False
        self._threads: set[int] = set()
        logging.getLogger(_EXPORTER).addFilter(lambda record: record.thread not in self._threads)

    def export(self, spans: Sequence[ReadableSpan]) -> Any:
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._threads.add(threading.get_ident())
        result = self._inner.export(spans)
        if result is not SpanExportResult.SUCCESS and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "traces cannot be sent to the OpenTelemetry collector; the job continues",
                extra={"topic": "traces-are-not-sent"},
            )
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return bool(self._inner.force_flush(timeout_millis))
