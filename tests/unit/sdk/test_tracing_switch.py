"""Traces are turned on by a variable, and what ended is sent when the process ends."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tinsmith.errors import ConfigurationError
from tinsmith.rpc.traced_calls import is_standing
from tinsmith.tracing import spans, switch

_TIMEOUT_S = 120


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent, as services with the names of their spans."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []

    def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            name = next(a for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                self.received += [(name.value.string_value, span.name) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.mark.parametrize("variable", ["TINSMITH_TRACE", "OTEL_EXPORTER_OTLP_ENDPOINT"])
def test_spans_of_each_service_reach_the_collector(
    collector: tuple[Collector, str], variable: str
) -> None:
    kept, address = collector
    program = (
        "from opentelemetry import trace\n"
        "from tinsmith.tracing import spans, switch\n"
        "switch.start()\n"
        "with trace.get_tracer('loop').start_as_current_span('of the user'):\n"
        "    with spans.block('of the client'):\n"
        "        spans.begin('of a pod', service='trainer').end()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, variable: address},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(kept.received) == [
        ("tinsmith-client", "of the client"),
        ("tinsmith-client", "of the user"),
        ("tinsmith-trainer", "of a pod"),
    ]


def test_the_own_variable_wins_and_an_empty_one_is_none() -> None:
    assert switch.endpoint({}) == ""
    assert switch.endpoint({"TINSMITH_TRACE": "", "OTEL_EXPORTER_OTLP_ENDPOINT": "b"}) == "b"
    assert switch.endpoint({"TINSMITH_TRACE": "a", "OTEL_EXPORTER_OTLP_ENDPOINT": "b"}) == "a"


def test_without_the_extra_the_own_variable_is_a_mistake_and_the_standard_one_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match="OpenTelemetry is not installed") as caught:
        switch.start({"TINSMITH_TRACE": "http://127.0.0.1:1"})
    assert "tinsmith[trace]" in str(caught.value)
    switch.start({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert "tinsmith[trace]" in caplog.text
    assert not spans.is_on()


def test_a_block_without_traces_is_nothing_and_a_span_cannot_be_begun() -> None:
    with spans.block("step", begins=True):
        pass
    with pytest.raises(RuntimeError, match="is_on"):
        spans.begin("step")


def test_what_is_asked_again_and_again_is_no_span() -> None:
    assert is_standing("/tinsmith.v1.WorkerService/HeartbeatWorker")
    assert not is_standing("/tinsmith.v1.TrainerService/OptimStep")
