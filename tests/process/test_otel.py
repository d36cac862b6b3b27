"""Traces of real runs, as a collector receives them by OTLP over HTTP, and an unreachable collector."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from kit import decided
from kit.launching import Launcher

from aelastic.observe import run_events as ev
from aelastic.observe.export import otel
from aelastic.workers.states import WorkerState

pytestmark = pytest.mark.usefixtures("warm_stores")

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")  # in the group dev
pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
from opentelemetry.sdk.trace import TracerProvider  # noqa: E402
from opentelemetry.sdk.trace.export import SimpleSpanProcessor  # noqa: E402
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter  # noqa: E402

# Fails once, then succeeds.
FAILS_ONCE = "sys.exit(0 if restart else 3)"
# In an agent: on a busy machine, importing the SDK and sending may be slow.
PATIENT = "from aelastic.observe.export.otel import Traces\nTraces.close_timeout_s = 20.0\n"


class Collector:
    """A collector that keeps what it receives."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                request = service.ExportTraceServiceRequest.FromString(body)
                scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
                collector.spans += [span for scope in scopes for span in scope.spans]
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.server.server_port}"}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    serving = threading.Thread(target=collector.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    serving.start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()
    serving.join()


def test_a_run_with_a_restart_is_one_trace(launch: Launcher, collector: Collector) -> None:
    options = "--max-restarts", "1", "--rdzv-id", "job-7", "--rdzv-backend", "c10d"
    job = launch(FAILS_ONCE, *options, env=collector.env, wrapper=PATIENT)
    job.assert_ends()
    by_name = {span.name: span for span in collector.spans}
    assert {"run", "round 1", "round 2", "restart", "rendezvous", "spawn", "detect"} <= by_name.keys()
    assert len({span.trace_id for span in collector.spans}) == 1
    run, first, restart = by_name["run"], by_name["round 1"], by_name["restart"]
    assert not run.parent_span_id and {first.parent_span_id, restart.parent_span_id} == {run.span_id}
    assert run.start_time_unix_nano <= first.start_time_unix_nano < restart.start_time_unix_nano
    assert restart.start_time_unix_nano < restart.end_time_unix_nano <= run.end_time_unix_nano
    attributes = {each.key: each.value.string_value for each in restart.attributes}
    assert attributes["cause"] == "failure" and "rank 0" in attributes["reason"]
    assert [event.name for event in first.events] == ["worker failed"] and first.status.code == 2
    assert by_name["round 2"].status.code == 0


def spans_of(*events: ev.RunEvent) -> dict[str, Any]:
    """The spans of a run with these events, by name."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    spans = otel._Spans(provider.get_tracer("aelastic"), 0)
    for now, event in enumerate(events):
        spans.tell(event, float(now))
    return {span.name: span for span in kept.get_finished_spans()}


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_recovery_in_place_is_reported_by_its_round_and_its_restart(is_given_up: bool) -> None:
    began = ev.RunBegan("job 7", "node-1", "host-1", 4711, "trainer", "train.py", 2, 1, 2, 3, "c10d")
    first = ev.RoundFormed(1, 1, 0, 0, 1, 0, 4, 4)
    recovered = ev.Recovered(2, 1, workers_kept=3, workers_replaced=1, step=1234, source_rank=0, duration_s=0.06)
    given_up = ev.NotRecovered(1, "no worker has survived")
    end = ev.RunEnded(WorkerState.SUCCEEDED, "")
    started = ev.WorkersStarted(1, {})
    restarting = ev.Restarting("failure", decided.restart(), 1, in_place=True)
    after = (given_up, first.replace(round=2), started) if is_given_up else (
        first.replace(round=2, in_place=True), started, recovered,
    )  # fmt: skip
    spans = spans_of(began, first, started, restarting, *after, end)
    assert spans["round 2"].attributes["in_place"] is not is_given_up
    assert spans["restart"].attributes["in_place"] is not is_given_up
    if is_given_up:
        assert [(event.name, event.attributes["reason"]) for event in spans["round 1"].events] == [
            ("not recovered", "no worker has survived")
        ]
    else:
        found = spans["round 2"].events[0]
        assert (found.name, found.attributes["workers_kept"], found.attributes["step"]) == ("recovered", 3, 1234)


def test_a_collector_that_is_away_costs_one_warning(launch: Launcher) -> None:
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    job = launch("say('done')", env=env, wrapper=PATIENT)
    job.assert_ends()
    assert job.stderr.count("traces cannot be sent to the OpenTelemetry collector") == 1, job.stderr
    assert "Traceback" not in job.stderr and len(job.stderr.splitlines()) == 1, job.stderr


@pytest.mark.parametrize(
    "off",
    [pytest.param({"OTEL_SDK_DISABLED": "true"}, marks=pytest.mark.all), {"OTEL_TRACES_EXPORTER": "none"}],
    ids=str,
)
def test_traces_are_off_where_the_environment_turns_them_off(
    launch: Launcher, collector: Collector, off: dict[str, str]
) -> None:
    job = launch("say('done')", env={**collector.env, **off})
    assert job.wait() == 0, job.story
    assert not collector.spans and not job.stderr
