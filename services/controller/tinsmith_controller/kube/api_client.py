"""The Kubernetes API: JSON in, JSON out, failures as our own errors.

The official client gives us credentials, TLS and connections; its models are left aside, because
they know neither our resources nor the fields of other versions of the server.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException

from tinsmith_controller.metrics import API_REQUESTS
from tinsmith_runtime import failpoints
from tinsmith_runtime.errors import ConfigError

Json = dict[str, Any]

_CONNECT_TIMEOUT_S = 5.0
_READ_TIMEOUT_S = 30.0
_LEASE_TIMEOUT_S = 3.0
_WATCH_SLACK_S = 30.0
_VERSION_TIMEOUT_S = 5.0
_PAGE_SIZE = 500
_JSON = "application/json"
_USER_AGENT = "tinsmith-controller"


class ApiError(Exception):
    """A request that failed.

    Attributes:
        status: HTTP status; 0 if there was no answer.
        reason: One word of the server, such as `Conflict`.
        message: What the server says.
    """

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(f"{status} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message

    @property
    def is_outcome_unknown(self) -> bool:
        """Whether a write may have been done, or be done later: the server did not say no."""
        return self.status in (0, 408) or self.status >= 500

    @property
    def may_pass(self) -> bool:
        """Whether the same request may be answered later: the server is away, or has too much."""
        return self.is_outcome_unknown or self.status == 429

    @property
    def is_not_found(self) -> bool:
        """Whether there is no such object."""
        return self.status == 404

    @property
    def is_conflict(self) -> bool:
        """Whether the object was changed meanwhile, or is another one than was meant."""
        return self.status == 409 and self.reason != "AlreadyExists"

    @property
    def already_exists(self) -> bool:
        """Whether there is an object of the name."""
        return self.reason == "AlreadyExists"

    @property
    def is_gone(self) -> bool:
        """Whether the resource version is too old to watch from."""
        return self.status == 410

    @property
    def is_invalid(self) -> bool:
        """Whether the object cannot be right, however often it is sent."""
        return self.status in (400, 422)

    @property
    def is_forbidden(self) -> bool:
        """Whether a quota or a policy of the cluster refuses it."""
        return self.status == 403


@dataclass(frozen=True, slots=True)
class Resource:
    """A kind of object, as paths name it."""

    group: str
    version: str
    plural: str
    is_namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Return the path of the objects of a namespace, or of all; or of one of them."""
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if self.is_namespaced and namespace else ""
        parts = [part for part in (self.plural, name, subresource) if part]
        return f"{base}{scope}/{'/'.join(parts)}"


JOBS = Resource("tinsmith.dev", "v1alpha1", "trainingjobs")
POOLS = Resource("tinsmith.dev", "v1alpha1", "trainerpools")
PODS = Resource("", "v1", "pods")
NODES = Resource("", "v1", "nodes", is_namespaced=False)
SERVICES = Resource("", "v1", "services")
SECRETS = Resource("", "v1", "secrets")
CONFIG_MAPS = Resource("", "v1", "configmaps")
EVENTS = Resource("", "v1", "events")
LEASES = Resource("coordination.k8s.io", "v1", "leases")
PRIORITY_CLASSES = Resource("scheduling.k8s.io", "v1", "priorityclasses", is_namespaced=False)
WORKLOADS = Resource("kueue.x-k8s.io", "v1beta2", "workloads")
RESOURCE_FLAVORS = Resource("kueue.x-k8s.io", "v1beta2", "resourceflavors", is_namespaced=False)
WORKLOAD_PRIORITY_CLASSES = Resource(
    "kueue.x-k8s.io", "v1beta2", "workloadpriorityclasses", is_namespaced=False
)


class Cluster:
    """A connection to the API server; may be used by many threads.

    Args:
        kubeconfig: Path of a kubeconfig; empty takes the pod's own service account.
        num_connections: Connections that are kept open.
    """

    def __init__(self, kubeconfig: str = "", *, num_connections: int = 32) -> None:
        settings = client.Configuration()
        try:
            if kubeconfig:
                config.load_kube_config(kubeconfig, client_configuration=settings)
            else:
                config.load_incluster_config(client_configuration=settings)
        except config.ConfigException as error:
            raise ConfigError(
                f"no access to a Kubernetes cluster: {error}; run in a pod, or set kubeconfig"
            ) from error
        settings.connection_pool_maxsize = num_connections
        # Retries are the work queue's; a connection that died in silence is found by keepalive.
        settings.retries = False
        settings.socket_options = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
        ]
        self._client = client.ApiClient(settings)
        self._client.user_agent = _USER_AGENT

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def minor_version(self) -> int:
        """Return the minor version of the server: 20 for 1.20."""
        answer = self._call("GET", "/version", read_timeout_s=_VERSION_TIMEOUT_S)
        digits = "".join(filter(str.isdigit, str(answer.get("minor", ""))))
        return int(digits or 0)

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        """Return one object."""
        return self._call("GET", resource.path(namespace, name))

    def list(self, resource: Resource, namespace: str = "") -> tuple[list[Json], str]:
        """Return all objects of a namespace, or of all, and the version to watch from."""
        items: list[Json] = []
        query: dict[str, Any] = {"limit": _PAGE_SIZE}
        while True:
            answer = self._call("GET", resource.path(namespace), query=query)
            items += answer.get("items") or []
            metadata = answer.get("metadata") or {}
            if not metadata.get("continue"):
                return items, str(metadata.get("resourceVersion", ""))
            query["continue"] = metadata["continue"]

    def watch(
        self, resource: Resource, namespace: str, version: str, *, timeout_s: int
    ) -> Iterator[tuple[str, Json]]:
        """Yield changes after a version until the server ends the watch.

        Raises:
            ApiError: If the connection fails; `is_gone` if the version is too old.
        """
        query = {
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": timeout_s,
        }
        response = self._send(
            "GET", resource.path(namespace), query=query, read_timeout_s=timeout_s + _WATCH_SLACK_S
        )
        try:
            for line in _lines(response):
                event = json.loads(line)
                content = event.get("object") or {}
                if event.get("type") == "ERROR":
                    raise _failure_of(content, 0)
                yield str(event.get("type")), content
        except (urllib3.exceptions.HTTPError, OSError, json.JSONDecodeError) as error:
            raise ApiError(0, "Disconnected", str(error)) from error
        finally:
            response.close()

    def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        """Create an object."""
        return self._call("POST", resource.path(namespace), body=body)

    def replace(
        self, resource: Resource, namespace: str, body: Json, *, subresource: str = ""
    ) -> Json:
        """Replace an object, or its status, unless it was changed since it was read."""
        name = body["metadata"]["name"]
        return self._call("PUT", resource.path(namespace, name, subresource), body=body)

    def patch(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        """Change some fields of an object, by a JSON merge patch."""
        return self._call(
            "PATCH",
            resource.path(namespace, name),
            body=body,
            content_type="application/merge-patch+json",
        )

    def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        *,
        uid: str = "",
        grace_s: int | None = None,
    ) -> Json | None:
        """Delete an object, if it is the one that is meant; return None if it is gone."""
        options: Json = {"propagationPolicy": "Background"}
        if uid:
            options["preconditions"] = {"uid": uid}
        if grace_s is not None:
            options["gracePeriodSeconds"] = grace_s
        try:
            return self._call("DELETE", resource.path(namespace, name), body=options)
        except ApiError as failure:
            if failure.is_not_found or (uid and failure.status == 409):
                return None
            raise

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = _JSON,
        read_timeout_s: float = _READ_TIMEOUT_S,
    ) -> Json:
        is_lease = LEASES.plural in path.split("/")
        is_write = method != "GET" and not is_lease
        if is_write:
            failpoints.passing("controller.write")
        response = self._send(
            method,
            path,
            query=query,
            body=body,
            content_type=content_type,
            # A lease that is not renewed in time is lost; a stalled connection must not cost it.
            read_timeout_s=_LEASE_TIMEOUT_S if is_lease else read_timeout_s,
        )
        try:
            content = response.read()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise ApiError(0, "Disconnected", str(error)) from error
        finally:
            response.release_conn()
        if is_write:
            failpoints.passing("controller.wrote")
        found: Json = json.loads(content)
        return found

    def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        content_type: str = _JSON,
        read_timeout_s: float = _READ_TIMEOUT_S,
    ) -> Any:
        try:
            response = self._client.call_api(
                path,
                method,
                query_params=list((query or {}).items()),
                header_params={"Accept": _JSON, "Content-Type": content_type},
                body=body,
                auth_settings=["BearerToken"],
                _return_http_data_only=True,
                _preload_content=False,
                _request_timeout=(_CONNECT_TIMEOUT_S, read_timeout_s),
            )
        except ApiException as error:
            API_REQUESTS.labels(method, str(error.status)).inc()
            raise _failure(error) from error
        except (urllib3.exceptions.HTTPError, OSError) as error:
            API_REQUESTS.labels(method, "unreachable").inc()
            raise ApiError(0, "Unreachable", str(error)) from error
        except AttributeError as error:
            # The client decodes the body of every failure; that of a TLS handshake has none.
            if not isinstance(error.__context__, ApiException):
                raise
            API_REQUESTS.labels(method, "unreachable").inc()
            reason = str(error.__context__.reason).replace("\n", ": ")
            raise ApiError(0, "Unreachable", reason) from error
        API_REQUESTS.labels(method, str(response.status)).inc()
        return response


def _lines(response: Any) -> Iterator[bytes]:
    buffer = b""
    for chunk in response.stream(amt=None, decode_content=False):
        buffer += chunk
        *lines, buffer = buffer.split(b"\n")
        yield from (line for line in lines if line.strip())


def _failure(error: ApiException) -> ApiError:
    """Return the failure behind an exception of the client."""
    try:
        content = json.loads(error.body or "{}")
    except (TypeError, ValueError):
        content = {}
    found = _failure_of(content if isinstance(content, dict) else {}, error.status or 0)
    return found if found.reason else ApiError(found.status, str(error.reason), found.message)


def _failure_of(content: Mapping[str, Any], status: int) -> ApiError:
    return ApiError(
        int(content.get("code") or status),
        str(content.get("reason") or ""),
        str(content.get("message") or "no message"),
    )
