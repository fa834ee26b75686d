"""Metrics that every pod has, and the endpoint that serves them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import Counter, Gauge, Histogram, start_http_server

from tinsmith_runtime.errors import ConfigError

RPC_SECONDS = Histogram(
    "tinsmith_rpc_duration_seconds",
    "Wall time of one call, by method and status code.",
    ["method", "code"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30),
)
RPC_ERRORS = Counter(
    "tinsmith_rpc_errors_total", "Calls that failed, by method and reason.", ["method", "reason"]
)
RPC_IN_FLIGHT = Gauge("tinsmith_rpc_in_flight", "Calls that are being served.", ["method"])
RPC_LIMITED = Counter(
    "tinsmith_rpc_limited_total",
    "Requests refused because too much was in flight, by what was too much.",
    ["what"],
)
RPC_REQUESTS_IN_FLIGHT = Gauge(
    "tinsmith_rpc_requests_in_flight", "Requests of all keys in flight, waits apart."
)
RPC_BYTES_IN_FLIGHT = Gauge(
    "tinsmith_rpc_bytes_in_flight", "Bytes of the bodies of all keys' requests in flight."
)
LEDGER_COMMIT_SECONDS = Histogram(
    "tinsmith_ledger_commit_duration_seconds",
    "Wall time of one group commit, fsync included.",
    buckets=(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1),
)
LEDGER_COMMIT_WRITES = Histogram(
    "tinsmith_ledger_commit_writes",
    "Writes that shared one group commit.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256),
)


@dataclass(slots=True)
class MetricsServer:
    """The HTTP endpoint that Prometheus reads."""

    address: str
    _server: WSGIServer
    _thread: threading.Thread

    @classmethod
    def start(cls, address: str) -> MetricsServer:
        """Serve `/metrics` on `host:port`; port 0 picks a free one.

        Raises:
            ConfigError: If the address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        try:
            server, thread = start_http_server(int(port), addr=host)
        except (OSError, ValueError) as error:
            raise ConfigError(f"metrics_address {address!r} cannot be bound: {error}") from error
        return cls(f"{host}:{server.server_port}", server, thread)

    def stop(self) -> None:
        """Close the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
