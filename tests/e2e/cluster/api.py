"""A thin JSON client of the Kubernetes API: paths in, dictionaries out.

The official client hides what tests want to see: status codes and raw objects. It also refuses
answers of servers whose schema differs from its own.
"""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias
from urllib.parse import urlencode

import urllib3
import yaml

Json: TypeAlias = dict[str, Any]

_TIMEOUT_S = 30.0
_PATCHES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


class ApiError(RuntimeError):
    """The server refused a request.

    Attributes:
        status: HTTP status.
        reason: The word that Kubernetes gives it, such as `NotFound` or `Conflict`.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class WatchEvent:
    """One change: `ADDED`, `MODIFIED`, `DELETED` or `BOOKMARK`, and the object after it."""

    type: str
    object: Json


def path(
    api_version: str, plural: str, namespace: str = "", name: str = "", subresource: str = ""
) -> str:
    """Return the path of a collection, object or subresource: `path("v1", "pods", "default")`."""
    parts = ["", "api" if "/" not in api_version else "apis", api_version]
    if namespace:
        parts += ["namespaces", namespace]
    return "/".join([*parts, plural, *filter(None, (name, subresource))])


class ApiClient:
    """One identity at one server. Safe to use from several threads.

    Args:
        kubeconfig: File whose current context is used: with a client certificate or a token.
        num_connections: Connections that are kept open, watches included.
    """

    def __init__(self, kubeconfig: Path, num_connections: int = 32) -> None:
        cluster, user = _current(kubeconfig)
        self.server: str = cluster["server"].rstrip("/")
        headers = {"Authorization": f"Bearer {user['token']}"} if "token" in user else {}
        self._pool = urllib3.PoolManager(
            maxsize=num_connections,
            block=False,
            headers=headers,
            ssl_context=ssl_context_of(kubeconfig),
            # A request that was not sent, or was turned away unread, may be sent again.
            retries=urllib3.Retry(
                connect=3, read=0, status=5, status_forcelist=[429], allowed_methods=None
            ),
        )

    def request(
        self,
        method: str,
        url: str,
        body: object = None,
        *,
        params: Mapping[str, object] | None = None,
        content_type: str = "application/json",
    ) -> Json:
        """Send one request and return the object in the answer.

        Raises:
            ApiError: If the server refuses it.
        """
        answer: Json = json.loads(self._send(method, url, body, params, content_type).data)
        return answer

    def text(self, url: str, **params: object) -> str:
        """Return an answer that is no JSON, such as a log."""
        return self._send("GET", url, None, params, "").data.decode(errors="replace")

    def get(self, url: str) -> Json:
        """Return one object."""
        return self.request("GET", url)

    def find(self, url: str) -> Json | None:
        """Return one object, or None if it does not exist."""
        try:
            return self.get(url)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    def list(self, url: str, **params: object) -> list[Json]:
        """Return the objects of a collection; `labelSelector=...` narrows it."""
        items: list[Json] = self.request("GET", url, params=params)["items"]
        return items

    def create(self, url: str, body: Json) -> Json:
        """Create an object in a collection."""
        return self.request("POST", url, body)

    def replace(self, url: str, body: Json) -> Json:
        """Replace an object; its `resourceVersion`, where given, is a precondition."""
        return self.request("PUT", url, body)

    def patch(
        self,
        url: str,
        body: object,
        kind: Literal["merge", "strategic", "json", "apply"] = "merge",
        **params: object,
    ) -> Json:
        """Change parts of an object."""
        return self.request("PATCH", url, body, params=params, content_type=_PATCHES[kind])

    def delete(
        self, url: str, *, grace_s: int | None = None, uid: str = "", propagation: str = ""
    ) -> None:
        """Delete an object; that it is gone, or was replaced by a namesake, is no error."""
        options: Json = {"apiVersion": "v1", "kind": "DeleteOptions"}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        if uid:
            options["preconditions"] = {"uid": uid}
        if propagation:
            options["propagationPolicy"] = propagation
        try:
            self.request("DELETE", url, options)
        except ApiError as error:
            if error.status != 404 and not (uid and error.status == 409):
                raise

    def open_watch(self, url: str, *, timeout_s: int, **params: object) -> urllib3.BaseHTTPResponse:
        """Begin a watch; `read_events` reads it, its method `shutdown` ends it from elsewhere."""
        query = {**params, "watch": "true", "timeoutSeconds": timeout_s}
        return self._send("GET", url, None, query, "", stream_s=timeout_s + _TIMEOUT_S)

    def watch(self, url: str, *, timeout_s: int, **params: object) -> Iterator[WatchEvent]:
        """Yield the changes of a collection for a while."""
        response = self.open_watch(url, timeout_s=timeout_s, **params)
        try:
            yield from read_events(response)
        finally:
            response.close()

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._pool.clear()

    def _send(
        self,
        method: str,
        url: str,
        body: object,
        params: Mapping[str, object] | None,
        content_type: str,
        stream_s: float = 0.0,
    ) -> urllib3.BaseHTTPResponse:
        query = urlencode(params) if params else ""
        response = self._pool.request(
            method,
            f"{self.server}{url}" + (f"?{query}" if query else ""),
            body=None if body is None else json.dumps(body).encode(),
            headers={**self._pool.headers, "Content-Type": content_type, "Accept": "*/*"},
            preload_content=not stream_s,
            timeout=urllib3.Timeout(connect=5.0, read=stream_s or _TIMEOUT_S),
        )
        if response.status < 400:
            return response
        data = response.data
        response.release_conn()
        try:
            status = json.loads(data)
            raise ApiError(response.status, status.get("reason", ""), status.get("message", ""))
        except json.JSONDecodeError:
            raise ApiError(response.status, "", data.decode(errors="replace")[:500]) from None


def read_events(response: urllib3.BaseHTTPResponse) -> Iterator[WatchEvent]:
    """Yield the events of an open watch until the server ends it.

    Raises:
        ApiError: If the watch cannot go on, with status 410 if it must start from a new list.
    """
    rest = b""
    for chunk in response.stream(amt=None, decode_content=False):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in filter(None, lines):
            event = json.loads(line)
            if event["type"] == "ERROR":
                status = event["object"]
                raise ApiError(status["code"], status.get("reason", ""), status.get("message", ""))
            yield WatchEvent(event["type"], event["object"])


def _named(entries: list[Json], name: str) -> Json:
    return next(entry for entry in entries if entry["name"] == name)


def ssl_context_of(kubeconfig: Path) -> Any:
    """Return how the current context of a kubeconfig speaks TLS."""
    cluster, user = _current(kubeconfig)
    # ssl takes certificates from files only; what the kubeconfig holds inline is written out.
    with tempfile.TemporaryDirectory() as folder:
        return _ssl_context(cluster, user, Path(folder))


def _current(kubeconfig: Path) -> tuple[Json, Json]:
    """Return the cluster and the user of the current context."""
    config = yaml.safe_load(kubeconfig.read_text())
    context = _named(config["contexts"], config["current-context"])["context"]
    cluster = _named(config["clusters"], context["cluster"])["cluster"]
    return cluster, _named(config["users"], context["user"])["user"]


def _ssl_context(cluster: Json, user: Json, folder: Path) -> Any:
    def file(holder: Json, key: str) -> str | None:
        if data := holder.get(f"{key}-data"):
            (folder / key).write_bytes(base64.b64decode(data))
            return str(folder / key)
        return holder.get(key)

    context = urllib3.util.ssl_.create_urllib3_context()
    context.load_verify_locations(file(cluster, "certificate-authority"))
    if certificate := file(user, "client-certificate"):
        context.load_cert_chain(certificate, file(user, "client-key"))
    return context
