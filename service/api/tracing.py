"""Optional spans of OpenTelemetry: one for each text, with its parts. Imported where they are on.

They are made at the ingress when a request is over, from the times that the engine has told: no
cycle knows of them. No prompt and no answer is in them.
"""

import os
from collections.abc import Mapping

from opentelemetry import context as otel
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.observed import Life

REQUEST_ID = "spd.request_id"
_NS = 1_000_000_000


class TraceContext:
    """Lets what is done for a request know its caller's span (W3C's traceparent) and its id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._propagator = TraceContextTextMapPropagator()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        caller = self._propagator.extract(dict(Headers(scope=scope)))
        context = otel.set_value(REQUEST_ID, scope["state"]["request_id"], caller)
        token = otel.attach(context)
        try:
            await self._app(scope, receive, send)
        finally:
            otel.detach(token)


class Tracer:
    """Makes the spans of requests: a `service.api.observed.Observer`."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        self._tracer = provider.get_tracer("spd-serve")
        self._model = model

    def first_token(self, seconds: float) -> None:
        """Its time is in the span of the whole request."""

    def over(self, life: Life) -> None:
        ended_ns = life.arrived_ns + round(life.ended_s * _NS)
        span = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            start_time=life.arrived_ns,
            attributes=self._attributes(life),
        )
        if span.is_recording():
            context = set_span_in_context(span)
            for name, start, end in parts(life, ended_ns):
                self._tracer.start_span(name, context, start_time=start).end(end)
            if life.rejection is not None or life.outcome == "error":
                span.set_status(Status(StatusCode.ERROR, life.rejection or "error"))
        span.end(ended_ns)

    def _attributes(self, life: Life) -> Mapping[str, str | int | float | tuple[str, ...]]:
        """By OpenTelemetry's conventions for generative models where they have a name for it."""
        request, stats = life.request, life.stats
        found: dict[str, str | int | float | tuple[str, ...]] = {
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.request.temperature": request.sampling.temperature,
            "gen_ai.request.top_p": request.sampling.top_p,
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
            "gen_ai.usage.output_tokens": life.tokens,
            "gen_ai.response.finish_reasons": (life.rejection or life.outcome or "error",),
        }
        if (request_id := otel.get_value(REQUEST_ID)) is not None:
            found[REQUEST_ID] = str(request_id)
        if life.first_token_s is not None:
            found["spd.time_to_first_token_s"] = life.first_token_s
        if stats is not None:
            found["spd.cycles"] = stats.cycles
            found["spd.drafted_tokens"] = stats.drafted
            found["spd.accepted_tokens"] = stats.accepted
            found["spd.cached_tokens"] = stats.cached
        return found


def parts(life: Life, ended_ns: int) -> list[tuple[str, int, int]]:
    """Name, start and end in ns of what a finished request went through; of a resumed one, of its
    last run. The engine knows how long each took, the ingress when the last token was there."""
    times = None if life.stats is None else life.stats.times
    if times is None:
        return []
    marks = [ended_ns]
    for seconds in (times.decode, times.prefill, times.queue):
        marks.append(max(life.arrived_ns, marks[-1] - round(seconds * _NS)))
    end, decode, prefill, queue = marks
    return [("queue", queue, prefill), ("prefill", prefill, decode), ("decode", decode, end)]


def otlp_tracer(endpoint: str, model: str) -> Tracer:
    """Sends spans to a collector over OTLP/HTTP, in batches and in a thread of its own. All else is
    as OpenTelemetry's environment variables say (OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS,
    OTEL_SERVICE_NAME ..)."""
    name = os.environ.get("OTEL_SERVICE_NAME", "spd-serve")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
    return Tracer(provider, model)
