"""`/healthz` and `/readyz` over HTTP, for the cluster's probes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tinsmith_runtime.errors import ConfigError

_TIMEOUT_S = 10.0


class HealthServer:
    """Answers probes.

    Args:
        address: `host:port`.
        is_alive: Whether the process works; false has it started anew.
        is_ready: Whether it has begun; a rollout waits for that.
    """

    def __init__(
        self, address: str, *, is_alive: Callable[[], bool], is_ready: Callable[[], bool]
    ) -> None:
        answers: dict[str, Callable[[], bool]] = {
            "/healthz": is_alive,
            "/readyz": lambda: is_ready() and is_alive(),
        }

        class Handler(BaseHTTPRequestHandler):
            timeout = _TIMEOUT_S

            def do_GET(self) -> None:
                is_good = answers.get(self.path)
                code = 404 if is_good is None else 200 if is_good() else 503
                body = b"ok\n" if code == 200 else b"not ok\n"
                self.send_response(code)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Probes are not worth a line."""

        host, _, port = address.rpartition(":")
        try:
            self._server = ThreadingHTTPServer((host.strip("[]"), int(port)), Handler)
        except (OSError, ValueError) as error:
            raise ConfigError(f"health_address {address!r} cannot be used: {error}") from error
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="health", daemon=True
        )

    def start(self) -> None:
        """Begin to answer."""
        self._thread.start()

    def stop(self) -> None:
        """Answer no more."""
        self._server.shutdown()
        self._server.server_close()
