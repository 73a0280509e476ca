"""Spans of requests: whose children they are, what they say, and that there are none unasked."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from service.api.observed import Observed
from service.api.tracing import Tracer, otlp_tracer
from service.config import ConfigError, parse_settings
from service.messages import Delta, Failure, RequestStats, RequestTimes
from tests.api_server import CHAT, MODEL, TEXT, make_api, serving
from tests.fake_pipeline import FakePipeline, Hang

TRACE, PARENT = 0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7
CALLER = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-01", "X-Request-Id": "mine-7"}
UNSAMPLED = {"traceparent": f"00-{TRACE:032x}-{PARENT:016x}-00"}
# The pipeline is a script: its times are shorter than what it says, so the queue is cut off.
TIMES = RequestTimes(queue=0.0, prefill=0.0001, decode=0.0002)
STATS = RequestStats(
    prompt_tokens=5, generated_tokens=2, decoded=1, cycles=3, drafted=1, accepted=1, times=TIMES
)
SCRIPT = [Delta(1, "a"), Delta(2, "b", "stop", STATS)]


class Traced:
    """The API over a script, with spans."""

    def __init__(self, pipeline: FakePipeline, url: str, exporter: InMemorySpanExporter) -> None:
        self.pipeline, self.url, self._exporter = pipeline, url, exporter

    def spans(self) -> dict[str, list[Any]]:
        """All so far, by name."""
        found: dict[str, list[Any]] = {}
        for span in self._exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        self._exporter.clear()
        return found


@pytest.fixture(scope="module")
def running() -> Iterator[Traced]:
    exporter, pipeline = InMemorySpanExporter(), FakePipeline()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    observed = Observed(pipeline, [Tracer(provider, MODEL)])
    with serving(make_api(observed, is_traced=True)) as url:
        yield Traced(pipeline, url, exporter)


@pytest.fixture
def traced(running: Traced) -> Traced:
    running.pipeline.play(SCRIPT)
    running.spans()
    return running


@pytest.mark.parametrize("stream", [False, True])
def test_a_request(traced: Traced, stream: bool) -> None:
    url = f"{traced.url}/v1/chat/completions"
    answer = httpx.post(url, json=CHAT | {"stream": stream, "max_tokens": 9}, headers=CALLER)
    assert answer.status_code == 200
    spans = traced.spans()
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode"}
    (request,) = spans["llm_request"]
    assert request.kind == SpanKind.SERVER
    assert request.context.trace_id == TRACE
    assert request.parent.span_id == PARENT
    said = dict(request.attributes)
    assert said.pop("gen_ai.request.id").endswith("-mine-7-0")
    assert said.pop("spd.time_to_first_token_s") >= 0
    assert said == {
        "gen_ai.request.model": MODEL,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.usage.input_tokens": len("<user>hi"),
        "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
        "spd.request_id": "mine-7",
        "spd.cycles": 3,
        "spd.drafted_tokens": 1,
        "spd.accepted_tokens": 1,
        "spd.cached_tokens": 0,
    }
    (queue,), (prefill,), (decode,) = (spans[name] for name in ("queue", "prefill", "decode"))
    assert {p.parent.span_id for p in (queue, prefill, decode)} == {request.context.span_id}
    assert request.start_time <= queue.start_time <= queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time <= decode.end_time == request.end_time
    assert request.status.status_code == StatusCode.UNSET


def test_without_a_caller_each_text_is_a_trace_of_its_own(traced: Traced) -> None:
    body = TEXT | {"prompt": ["a", "b"]}
    assert httpx.post(f"{traced.url}/v1/completions", json=body).status_code == 200
    first, second = traced.spans()["llm_request"]
    assert first.parent is None
    assert first.context.trace_id != second.context.trace_id
    assert first.attributes["spd.request_id"] == second.attributes["spd.request_id"]


def test_a_caller_that_does_not_sample_is_heeded(traced: Traced) -> None:
    url = f"{traced.url}/v1/chat/completions"
    assert httpx.post(url, json=CHAT, headers=UNSAMPLED).status_code == 200
    assert traced.spans() == {}


@pytest.mark.parametrize("header", ["nonsense", "00-0-0-00", ""])
def test_a_header_that_makes_no_sense_is_ignored(traced: Traced, header: str) -> None:
    url = f"{traced.url}/v1/chat/completions"
    assert httpx.post(url, json=CHAT, headers={"traceparent": header}).status_code == 200
    assert traced.spans()["llm_request"][0].parent is None


@pytest.mark.parametrize(
    ("script", "status", "outcome", "said"),
    [
        ([Failure("full", "overloaded")], 429, "queue_full", "queue_full"),
        ([Failure("late", "expired")], 503, "queue_timeout", "queue_timeout"),
        ([Delta(1, "a"), Failure("broken")], 503, "error", "error"),
        ([Delta(1, "a")], 500, "error", "error"),
    ],
)
def test_a_request_that_fails(traced: Traced, script, status, outcome, said) -> None:
    traced.pipeline.play(script)
    answer = httpx.post(f"{traced.url}/v1/chat/completions", json=CHAT, headers=CALLER)
    assert answer.status_code == status
    spans = traced.spans()
    (request,) = spans.pop("llm_request")
    assert spans == {}
    assert request.attributes["gen_ai.response.finish_reasons"] == (outcome,)
    assert (request.status.status_code, request.status.description) == (StatusCode.ERROR, said)


def test_a_client_that_goes(traced: Traced) -> None:
    traced.pipeline.play([Delta(1, "a"), Hang()])
    url, body = f"{traced.url}/v1/chat/completions", CHAT | {"stream": True}
    with httpx.stream("POST", url, json=body, headers=CALLER) as response:
        next(response.iter_lines())
    assert traced.pipeline.ended.wait(10)
    httpx.get(f"{traced.url}/health")  # after it the request's task is over
    (request,) = traced.spans()["llm_request"]
    assert request.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert request.context.trace_id == TRACE


# --- over the wire ------------------------------------------------------------------------------


@dataclass
class Collected:
    url: str = ""
    received: list[ExportTraceServiceRequest] = field(default_factory=list)
    came: threading.Condition = field(default_factory=threading.Condition)

    def spans(self, trace: int) -> list[Span]:
        return [
            span
            for request in self.received
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
            if span.trace_id == trace.to_bytes(16)
        ]

    def wait_for(self, trace: int, count: int) -> list[Span]:
        with self.came:
            assert self.came.wait_for(lambda: len(self.spans(trace)) >= count, 20)
        return self.spans(trace)


@contextmanager
def collector() -> Iterator[Collected]:
    """Takes OTLP/HTTP, as a collector does."""
    collected = Collected()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with collected.came:
                collected.received.append(ExportTraceServiceRequest.FromString(body))
                collected.came.notify_all()
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    collected.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield collected
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_collector_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the endpoint of the settings, whose path is the usual one."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    pipeline = FakePipeline()
    pipeline.play(SCRIPT)
    with collector() as collected:
        endpoint = parse_settings({"tracing": {"endpoint": collected.url}}).tracing.endpoint
        assert endpoint == f"{collected.url}/v1/traces"
        observed = Observed(pipeline, [otlp_tracer(endpoint, MODEL)])
        with serving(make_api(observed, is_traced=True)) as api:
            httpx.post(f"{api}/v1/chat/completions", json=CHAT, headers=CALLER)
            spans = collected.wait_for(TRACE, 4)
    resource = collected.received[0].resource_spans[0]
    assert {a.key: a.value.string_value for a in resource.resource.attributes}[
        "service.name"
    ] == "spd-serve"
    assert sorted(span.name for span in spans) == ["decode", "llm_request", "prefill", "queue"]


# --- off ----------------------------------------------------------------------------------------


def test_off_by_default() -> None:
    """Nothing of it is in a request's way, or even imported."""
    assert parse_settings({}).tracing.endpoint is None
    met = [middleware.cls.__name__ for middleware in make_api(FakePipeline()).user_middleware]
    assert met[0] == "Access"
    assert "TraceContext" not in met
    program = "import sys, service.api.routes; assert 'service.api.tracing' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize("endpoint", ["collector:4318", "grpc://collector:4317", "http://", ""])
def test_an_address_that_is_none(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: .*http://collector:4318/v1/traces"):
        parse_settings({"tracing": {"endpoint": endpoint}})


def test_without_the_extra_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http", None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: .*spd-serve\[tracing\]"):
        parse_settings({"tracing": {"endpoint": "http://collector:4318"}})
