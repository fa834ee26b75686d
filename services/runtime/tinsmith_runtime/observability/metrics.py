"""Metrics that every pod has, and the endpoint that serves them."""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import Counter, Gauge, Histogram, make_wsgi_app

from tinsmith.version import __version__
from tinsmith_runtime.errors import ConfigError

BUILD_INFO = Gauge(
    "tinsmith_build_info",
    "1, with the versions of Tinsmith and of Python that the pod runs.",
    ["version", "python"],
)
BUILD_INFO.labels(__version__, platform.python_version()).set(1)
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
    "tinsmith_rpc_requests_in_flight", "Requests of all projects in flight, waits apart."
)
RPC_BYTES_IN_FLIGHT = Gauge(
    "tinsmith_rpc_bytes_in_flight", "Bytes of the bodies of all projects' requests in flight."
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
LEDGER_WAITING_WRITES = Gauge(
    "tinsmith_ledger_waiting_writes",
    "Writes that wait for their group commit, of all databases of the pod.",
)
STORE_REQUEST_SECONDS = Histogram(
    "tinsmith_object_store_request_duration_seconds",
    "Wall time of one request to the object store, by operation and outcome: `ok`, `missing`, "
    "`exists`, `unavailable`, `refused`, `full` or `failed`. A streamed read ends with its last "
    "byte.",
    ["operation", "outcome"],
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300),
)
CONFINED_ENDS = Counter(
    "tinsmith_confined_ends_total",
    "Confined processes that were ended for their time or memory, or crashed, by their work.",
    ["work"],
)
STORE_BYTES = Counter(
    "tinsmith_object_store_bytes_total",
    "Bytes of objects that were `read` from the object store and `written` to it.",
    ["direction"],
)
CERTIFICATE_EXPIRY = Gauge(
    "tinsmith_certificate_expiry_timestamp_seconds",
    "When the certificate in use ends, in seconds since the epoch, by its use: `pods` or `front`.",
    ["use"],
)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Handler(WSGIRequestHandler):
    def log_message(self, *arguments: Any) -> None:
        """Write no line for each request."""


@dataclass(slots=True)
class MetricsServer:
    """The HTTP endpoint of Prometheus, and of health checks that have no certificate."""

    address: str
    _server: WSGIServer
    _thread: threading.Thread

    @classmethod
    def start(cls, address: str, is_serving: Callable[[], bool] | None = None) -> MetricsServer:
        """Serve `/metrics`, and `/healthz` if it is known whether the pod serves.

        Args:
            address: `host:port`; port 0 picks a free one.
            is_serving: Whether the pod answers calls; asked by a thread of the endpoint.

        Raises:
            ConfigError: If the address cannot be bound.
        """
        host, _, port = address.rpartition(":")
        metrics = make_wsgi_app()

        def serve(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
            if environ["PATH_INFO"] == "/healthz" and is_serving is not None:
                is_well = is_serving()
                status = "200 OK" if is_well else "503 Service Unavailable"
                start_response(status, [("Content-Type", "text/plain")])
                return [b"ok\n" if is_well else b"not serving\n"]
            page: Iterable[bytes] = metrics(environ, start_response)
            return page

        try:
            server = make_server(
                host, int(port), serve, server_class=_Server, handler_class=_Handler
            )
        except (OSError, ValueError) as error:
            raise ConfigError(f"metrics_address {address!r} cannot be bound: {error}") from error
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        thread.start()
        return cls(f"{host}:{server.server_port}", server, thread)

    def stop(self) -> None:
        """Close the endpoint."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)
