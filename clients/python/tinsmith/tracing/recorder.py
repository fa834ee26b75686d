"""Spans by OpenTelemetry's SDK; the one module that imports it.

Each service is a resource of its own (`service.name`), also where several share a process. All of
them hand their spans to one processor, which sends them in the background.
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterable, Mapping

from opentelemetry import context, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from tinsmith.tracing.spans import CLIENT, Headers, Kind, Span, Value
from tinsmith.version import __version__

_KINDS = {
    "internal": trace.SpanKind.INTERNAL,
    "client": trace.SpanKind.CLIENT,
    "server": trace.SpanKind.SERVER,
}
_NANOSECONDS = 1_000_000_000


class RecordedSpan:
    """A span of OpenTelemetry."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    @property
    def inner(self) -> trace.Span:
        """The span of the library."""
        return self._span

    @property
    def trace_id(self) -> str:
        """The trace, 32 hexadecimal digits."""
        return trace.format_trace_id(self._span.get_span_context().trace_id)

    def headers(self) -> Headers:
        """Return `traceparent`, and `tracestate` if there is one."""
        found: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(found, trace.set_span_in_context(self._span))
        return tuple(found.items())

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def enter(self) -> None:
        """Be the parent of what the current task begins from now on."""
        context.attach(trace.set_span_in_context(self._span))

    def within(self) -> contextlib.AbstractContextManager[object]:
        """Be the parent of what is begun within a block."""
        return trace.use_span(self._span, record_exception=False, set_status_on_exception=False)

    def end(self, *, problem: str = "", end_s: float | None = None) -> None:
        """Note the end."""
        if problem:
            self._span.set_status(trace.Status(trace.StatusCode.ERROR, problem))
        self._span.end(_nanoseconds(end_s))


class OpenTelemetryRecorder:
    """Makes spans of OpenTelemetry.

    Args:
        processor: Gets the spans of all services as they end.
    """

    def __init__(self, processor: SpanProcessor) -> None:
        self._processor = processor
        self._tracers: dict[str, trace.Tracer] = {}
        atexit.register(processor.shutdown)

    def serve_others(self) -> None:
        """Send the spans that a program of the user makes, unless it sends them by itself."""
        if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            trace.set_tracer_provider(self._provider(CLIENT))

    def begin(
        self,
        service: str,
        name: str,
        *,
        kind: Kind,
        parent: Span | None,
        is_root: bool,
        links: Iterable[Span],
        attributes: Mapping[str, Value],
        begin_s: float | None,
    ) -> Span:
        """Return a span that has begun."""
        above = context.Context() if is_root else None
        if parent is not None:
            above = trace.set_span_in_context(_inner(parent))
        return RecordedSpan(
            self._tracer(service).start_span(
                name,
                context=above,
                kind=_KINDS[kind],
                attributes=attributes,
                links=[trace.Link(_inner(link).get_span_context()) for link in links],
                start_time=_nanoseconds(begin_s),
            )
        )

    def current(self) -> Span | None:
        """Return the span that the current task is within."""
        return _known(trace.get_current_span())

    def received(self, headers: Mapping[str, str]) -> Span | None:
        """Return the span of another process that metadata names."""
        above = TraceContextTextMapPropagator().extract(headers, context.Context())
        return _known(trace.get_current_span(above))

    def flush(self) -> None:
        """Send what has ended."""
        self._processor.force_flush()

    def _tracer(self, service: str) -> trace.Tracer:
        tracer = self._tracers.get(service)
        if tracer is None:
            tracer = self._provider(service).get_tracer("tinsmith", __version__)
            self._tracers[service] = tracer
        return tracer

    def _provider(self, service: str) -> TracerProvider:
        named = {"service.name": f"tinsmith-{service}", "service.version": __version__}
        provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        provider.add_span_processor(self._processor)
        return provider


def _inner(span: Span) -> trace.Span:
    if not isinstance(span, RecordedSpan):
        raise TypeError(f"{span!r} is no span of this recorder")
    return span.inner


def _known(span: trace.Span) -> RecordedSpan | None:
    return RecordedSpan(span) if span.get_span_context().is_valid else None


def _nanoseconds(time_s: float | None) -> int | None:
    return None if time_s is None else int(time_s * _NANOSECONDS)
