"""The part of a kubelet's API that `kubectl logs` needs."""

from __future__ import annotations

import datetime
import ssl
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from tests.e2e.cluster.pki import Authority, KeyPair

_POLL_S = 0.1
_FOLLOW_TIMEOUT_S = 600.0

_FIRST_LOOKS: dict[Path, datetime.datetime] = {}

FindLog = Callable[[str, str, str, bool], tuple[Path, Callable[[], bool]]]
"""Namespace, pod, container, whether the start before is meant -> file, and whether it may grow.

Raises KeyError for what it does not know."""


class LogServer:
    """Serves `/containerLogs/NAMESPACE/POD/CONTAINER` to the API server alone."""

    def __init__(self, address: str, authority: Authority, serving: KeyPair, find: FindLog) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                _serve(self, find)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(serving.certificate, serving.key)
        context.load_verify_locations(authority.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
        self._server = ThreadingHTTPServer((address, 0), Handler)
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="logs", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)


def _stamped(file: Path, data: bytes) -> bytes:
    """Return lines with a time before each, as the container runtime writes them.

    The time of a printed line is not recorded. The times here are those of the first look at the
    file and a microsecond for each line before; they grow, and are the same at every look.
    `sinceSeconds` and `sinceTime` are not looked at: clients leave out what they have.
    """
    begin = _FIRST_LOOKS.setdefault(file, datetime.datetime.now(datetime.UTC))
    lines = data.splitlines(keepends=True)
    times = (begin + datetime.timedelta(microseconds=number) for number in range(len(lines)))
    return b"".join(
        f"{moment:%Y-%m-%dT%H:%M:%S.%f}000Z ".encode() + line
        for moment, line in zip(times, lines, strict=True)
    )


def _serve(request: BaseHTTPRequestHandler, find: FindLog) -> None:
    url = urlsplit(request.path)
    query = {key: values[-1] for key, values in parse_qs(url.query).items()}
    parts = url.path.strip("/").split("/")
    try:
        if len(parts) != 4 or parts[0] != "containerLogs":
            raise KeyError(f"only containerLogs is served, not {url.path}")
        file, may_grow = find(parts[1], parts[2], parts[3], query.get("previous") == "true")
    except KeyError as error:
        request.send_error(404, str(error.args[0]))
        return
    request.send_response(200)
    request.send_header("Content-Type", "text/plain")
    request.end_headers()
    data = file.read_bytes() if file.exists() else b""
    offset = len(data)
    if query.get("timestamps") == "true":
        data = _stamped(file, data)
    if "tailLines" in query:
        lines = data.splitlines(keepends=True)
        data = b"".join(lines[max(0, len(lines) - int(query["tailLines"])) :])
    request.wfile.write(data)
    end_s = time.monotonic() + _FOLLOW_TIMEOUT_S
    while query.get("follow") == "true" and time.monotonic() < end_s:
        grows = may_grow()  # asked before reading: what came before the end is not lost
        if file.exists():
            with file.open("rb") as log:
                log.seek(offset)
                data = log.read()
            offset += len(data)
            request.wfile.write(data)
            request.wfile.flush()
        if not grows:
            return
        time.sleep(_POLL_S)
