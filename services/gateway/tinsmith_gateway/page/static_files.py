"""The files of the page: built from `clients/web`, read once, served without a key.

They hold no data. What a browser may load and run is settled by their headers: files of this
server, no script within the page, no other origin.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

STATIC = Path(__file__).parent / "static"
INDEX = "index.html"

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # Asked for anew each time, and answered without a body while it is the same.
    "cache-control": "no-cache",
}
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class _File:
    content: bytes
    media_type: str
    tag: str


def static_routes() -> list[Route]:
    """Return the routes of the files: `/` for the page, `/page/<file>` for the others."""
    return [
        Route("/" if name == INDEX else f"/page/{name}", _serving(file), methods=["GET"])
        for name, file in _read(STATIC).items()
    ]


def _serving(file: _File) -> Callable[[Request], Awaitable[Response]]:
    headers = {**_HEADERS, "etag": file.tag}

    async def serve(request: Request) -> Response:
        if request.headers.get("if-none-match") == file.tag:
            return Response(status_code=304, headers=headers)
        return Response(file.content, media_type=file.media_type, headers=headers)

    return serve


def _read(folder: Path) -> Mapping[str, _File]:
    found = {}
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
        found[path.name] = _File(content, _TYPES[path.suffix], tag)
    return found
