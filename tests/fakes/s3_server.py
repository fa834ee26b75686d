"""An S3 server in a child process: moto on a free port, gone when its parent is gone."""

from __future__ import annotations

import contextlib
import re
import select
import ssl
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ACCESS_KEY, SECRET_KEY = "test-access-key", "test-secret-key"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": ACCESS_KEY, "AWS_SECRET_ACCESS_KEY": SECRET_KEY}
_START_TIMEOUT_S = 180.0
"""The imports take a second of a processor, which a busy machine gives to a nice process late."""
_ANSWER_TIMEOUT_S = 60.0

_CHILD = """
import sys, threading
from moto.moto_server.werkzeug_app import (
    DomainDispatcherApplication, MotoRequestHandler, create_backend_app
)
from werkzeug.serving import make_server
server = make_server(
    sys.argv[1], 0, DomainDispatcherApplication(create_backend_app), threaded=True,
    request_handler=MotoRequestHandler, ssl_context=tuple(sys.argv[2:]) or None,
)
threading.Thread(target=server.serve_forever, daemon=True).start()
print(server.server_port, flush=True)
sys.stdin.read()
server.shutdown()
"""


class S3Server:
    """A server of this machine.

    Attributes:
        host: The address that it listens on.
        port: The port.
    """

    def __init__(self, host: str, port: int, *, is_secure: bool) -> None:
        self.host = host
        self.port = port
        self._scheme = "https" if is_secure else "http"

    @property
    def endpoint(self) -> str:
        """The URL of the server."""
        return f"{self._scheme}://{self.host}:{self.port}"

    def create_bucket(self, bucket: str, context: ssl.SSLContext | None = None) -> None:
        """Create a bucket; the context knows the server's certificate."""
        request = urllib.request.Request(
            f"{self.endpoint}/{bucket}",
            method="PUT",
            # Says which of the services that the server plays is meant; nothing checks it.
            headers={"Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/0/us-east-1/s3/"},
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S, context=context):
            pass

    def keys(self, bucket: str) -> list[str]:
        """Return the names of the first thousand objects of a bucket."""
        request = urllib.request.Request(
            f"{self.endpoint}/{bucket}?list-type=2",
            headers={"Authorization": f"AWS4-HMAC-SHA256 Credential={ACCESS_KEY}/0/us-east-1/s3/"},
        )
        with urllib.request.urlopen(request, timeout=_ANSWER_TIMEOUT_S) as answer:
            return re.findall(r"<Key>([^<]+)</Key>", answer.read().decode())

    def uri(self, bucket: str, prefix: str = "", **settings: object) -> str:
        """Return a storage URI of this server."""
        values = {"endpoint": self.endpoint, "path_style": "true", **settings}
        query = "&".join(f"{name}={value}" for name, value in values.items())
        return f"s3://{bucket}/{prefix}?{query}"


@contextlib.contextmanager
def running_s3_server(*certificate: Path, host: str = "127.0.0.1") -> Iterator[S3Server]:
    """Run a server for the time of a block.

    Args:
        *certificate: Files of a certificate and its key; without them it speaks no TLS.
        host: The address that it listens on.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, host, *map(str, certificate)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            ready, _, _ = select.select([child.stdout], [], [], _START_TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"the S3 server did not start in {_START_TIMEOUT_S:.0f} s")
            line = child.stdout.readline()
            if not line:
                raise RuntimeError(f"the S3 server ended with exit code {child.wait(10)}")
            yield S3Server(host, int(line), is_secure=bool(certificate))
        finally:
            child.stdin.close()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
