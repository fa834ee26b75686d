"""A mirror of the Hugging Face hub on this machine: what `HF_ENDPOINT` may name instead of the hub.

It speaks as much of the hub's protocol as `huggingface_hub` needs to fetch a model: what a revision
holds, and its files with their hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

_INFO = re.compile(r"/api/models/([^/]+/[^/]+)/revision/[^/]+")
_TREE = re.compile(r"/api/models/([^/]+/[^/]+)/tree/[^/]+/?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)")


class HubMirror:
    """What a mirror offers, and what was asked of it.

    Attributes:
        endpoint: Its URL.
        served: Files that were sent, `owner/name/file`.
    """

    def __init__(self, models: dict[str, Path], endpoint: str) -> None:
        self.models = models
        self.endpoint = endpoint
        self.served: list[str] = []


@contextlib.contextmanager
def running_hub(models: dict[str, Path]) -> Iterator[HubMirror]:
    """Serve models from directories for the time of a block.

    Args:
        models: Directory by `owner/name`.
    """
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    mirror = HubMirror(models, f"http://127.0.0.1:{server.server_port}")
    server.mirror = mirror  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        mirror: HubMirror = self.server.mirror  # type: ignore[attr-defined]
        for pattern, answer in ((_INFO, self._info), (_TREE, self._tree)):
            match = pattern.fullmatch(path)
            if match is not None and match[1] in mirror.models:
                self._send(json.dumps(answer(match[1], mirror.models[match[1]])).encode())
                return
        match = _FILE.fullmatch(path)
        file = mirror.models[match[1]] / match[2] if match and match[1] in mirror.models else None
        if match is None or file is None or not file.is_file():
            self._send(b"{}", status=404, headers={"X-Error-Code": "EntryNotFound"})
            return
        if self.command == "GET":
            mirror.served.append(f"{match[1]}/{match[2]}")
        data = file.read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        self._send(
            data, headers={"ETag": f'"{etag}"', "X-Repo-Commit": _commit(mirror.models[match[1]])}
        )

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def _info(self, name: str, folder: Path) -> dict[str, object]:
        files = sorted(path.name for path in folder.iterdir() if path.is_file())
        return {
            "id": name,
            "modelId": name,
            "sha": _commit(folder),
            "siblings": [{"rfilename": file} for file in files],
            "private": False,
            "gated": False,
            "tags": [],
            "downloads": 0,
        }

    def _tree(self, name: str, folder: Path) -> list[dict[str, object]]:
        del name
        return [
            {
                "type": "file",
                "path": path.name,
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in sorted(folder.iterdir())
            if path.is_file()
        ]

    def _send(
        self, body: bytes, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def _commit(folder: Path) -> str:
    """Return the one revision that a folder has: a hash in the form that the hub's have."""
    return hashlib.sha1(str(folder).encode()).hexdigest()
