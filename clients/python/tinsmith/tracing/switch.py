"""Turns traces on, if a variable names where they go."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from collections.abc import Mapping

from tinsmith.errors import ConfigurationError
from tinsmith.tracing import spans

_LOG = logging.getLogger(__name__)

VARIABLE = "TINSMITH_TRACE"
STANDARD_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_NEEDED = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.grpc")
_lock = threading.Lock()


def endpoint(environ: Mapping[str, str]) -> str:
    """Return where traces go by variables; empty if they are off."""
    for variable in (VARIABLE, *STANDARD_VARIABLES):
        if environ.get(variable):
            return environ[variable]
    return ""


def start(environ: Mapping[str, str] = os.environ) -> None:
    """Record spans and send them over OTLP, if variables say where to; repeating changes nothing.

    `OTEL_*` variables of the library hold as well: headers, certificates, timeouts, samplers.

    Raises:
        ConfigurationError: If `TINSMITH_TRACE` is set and OpenTelemetry is not installed. For a
            standard variable alone, which may be meant for another program, a warning is logged.
    """
    address = endpoint(environ)
    if not address:
        return
    with _lock:
        if spans.is_on():
            return
        if not _is_installed():
            remedy = 'pip install "tinsmith[trace]"'
            if environ.get(VARIABLE):
                raise ConfigurationError(
                    f"{VARIABLE} is set, and OpenTelemetry is not installed", remedy=remedy
                )
            _LOG.warning("traces are off: OpenTelemetry is not installed; %s", remedy)
            return
        _install(address)


def _is_installed() -> bool:
    try:
        return all(importlib.util.find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:
        return False


def _install(address: str) -> None:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from tinsmith.tracing.recorder import OpenTelemetryRecorder

    exporter = OTLPSpanExporter(endpoint=address)
    recorder = OpenTelemetryRecorder(BatchSpanProcessor(exporter))
    recorder.serve_others()
    spans.install(recorder)
    _LOG.info("traces go to %s", address)
