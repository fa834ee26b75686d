"""Probes that pods of an old API server cannot have, against a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from tests.e2e.cluster.container import Container
from tests.e2e.cluster.probes import Probe

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool


def test_a_grpc_probe_follows_the_health_service(
    tmp_path: Path, executor: ThreadPoolExecutor, process_pods: None
) -> None:
    server = grpc.server(executor)
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    container = Container(
        tmp_path / "c", ["true"], env={}, mounts=[], hostname="c", cwd="/", log=tmp_path / "log"
    )
    spec = {"grpc": {"port": port, "service": "s"}, "periodSeconds": 0, "failureThreshold": 1}
    with ThreadPoolExecutor(1) as attempts:
        probe = Probe(spec, {"name": "c"}, container, "127.0.0.1", attempts, initially=False)
        for status in (SERVING, NOT_SERVING, SERVING):
            servicer.set("s", status)
            end_s = time.monotonic() + 10
            while probe.succeeded != (status == SERVING):
                assert time.monotonic() < end_s, probe.message
                probe.step()
                time.sleep(0.01)
    server.stop(None).wait(10)
    container.kill()
