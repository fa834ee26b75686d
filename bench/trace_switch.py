"""Traces that are turned on and off while a process runs."""

from __future__ import annotations

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from tinsmith.tracing import spans
from tinsmith.tracing.recorder import OpenTelemetryRecorder


class TraceSwitch:
    """Turns traces of this process on and off; recorder and exporter are as of `TINSMITH_TRACE`.

    Args:
        collector: `http://host:port` that spans go to.
    """

    def __init__(self, collector: str) -> None:
        self._recorder = OpenTelemetryRecorder(
            BatchSpanProcessor(OTLPSpanExporter(endpoint=collector))
        )

    def set(self, is_on: bool) -> None:
        """Record from now on, or send what was recorded and stop."""
        if not is_on:
            self._recorder.flush()
        spans.install(self._recorder if is_on else None)
