"""OpenTelemetry: a span for every request that reached the engine, under vLLM's names.

The libraries (`pip install '.[otel]'`) are imported only with `--otlp-endpoint`. A span is made from the exchange when
the answer is over; the exporter has a thread and a bounded queue of its own, and drops spans that it cannot send."""

from __future__ import annotations

import time
from typing import Any

from starlette.types import Scope

from server.config import ServerConfigError
from server.transport.exchange import Exchange

_TRACE_HEADERS = {b"traceparent": "traceparent", b"tracestate": "tracestate"}


class Tracing:
    """An observer of the gate. `processor`, one of OpenTelemetry's, gets the finished spans."""

    def __init__(self, processor: Any, model_name: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = TracerProvider(resource=Resource({"service.name": "xserv"}), shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("xserv")
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name

    def __call__(self, exchange: Exchange, scope: Scope, route: str, duration_s: float) -> None:
        """Records the span of a finished answer; nothing if the engine was not used."""
        if exchange.generation is None:
            return
        from opentelemetry.trace import SpanKind, StatusCode

        carrier = {_TRACE_HEADERS[name]: value.decode("latin-1") for name, value in scope["headers"]
                   if name in _TRACE_HEADERS}  # fmt: skip
        end_ns = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(carrier),
            kind=SpanKind.SERVER,
            start_time=end_ns - int(duration_s * 1e9),
            attributes=self._attributes(exchange, scope, route, duration_s),
        )
        if exchange.status >= 500:
            span.set_status(StatusCode.ERROR)
        span.end(end_ns)

    def close(self) -> None:
        """Sends the remaining spans."""
        self._provider.shutdown()

    def _attributes(self, exchange: Exchange, scope: Scope, route: str, duration_s: float) -> dict[str, Any]:
        generation, meter = exchange.generation, exchange.meter
        assert generation is not None
        assert meter is not None
        params, times = generation.params, meter.times
        attributes: dict[str, Any] = {
            "http.request.method": scope["method"],
            "http.route": route,
            "http.response.status_code": exchange.status,
            "gen_ai.request.id": exchange.answered_id,
            "gen_ai.response.model": exchange.model or self._model_name,
            "gen_ai.request.n": params.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.usage.num_sequences": sum(meter.reasons.values()),
            "gen_ai.usage.prompt_tokens": generation.num_prompt_tokens,
            "gen_ai.usage.completion_tokens": generation.num_completion_tokens,
            "xserv.prefix_cache.cached_tokens": generation.num_cached_tokens,
            "gen_ai.response.finish_reasons": sorted(meter.reasons),
            "gen_ai.latency.e2e": duration_s,
        }
        if (miss := generation.prefix_miss) is not None:
            attributes["xserv.prefix_cache.miss_reason"] = miss.reason
            attributes["xserv.prefix_cache.first_difference"] = miss.first_difference
        if meter.first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = meter.first_token_s - meter.arrival_s
        if times is not None and times.first_scheduled_s is not None:
            attributes["gen_ai.latency.time_in_queue"] = times.first_scheduled_s - times.arrival_s
            if times.first_token_s is not None and times.last_token_s is not None:
                attributes["gen_ai.latency.time_in_model_prefill"] = times.first_token_s - times.first_scheduled_s
                attributes["gen_ai.latency.time_in_model_decode"] = times.last_token_s - times.first_token_s
                attributes["gen_ai.latency.time_in_model_inference"] = times.last_token_s - times.first_scheduled_s
        return {name: value for name, value in attributes.items() if value is not None}


def open_tracing(endpoint: str, model_name: str) -> Tracing:
    """Traces to an OTLP collector over HTTP ("http://collector:4318/v1/traces"). Raises `ServerConfigError` if the
    libraries are missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        hint = "pip install '.[otel]' in xserv's checkout"
        raise ServerConfigError(f"otlp_endpoint needs OpenTelemetry: {hint}") from None
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=5)), model_name)
