"""Names and addresses of Services: what DNS and kube-proxy are in a cluster.

Both follow the EndpointSlices, which the real controller writes, so a pod that is not ready, or is
being deleted, gets nothing. Names go to `/etc/hosts` of every pod; a Service with an address of its
own listens there and passes connections on, each to the next pod. TCP only; a name of a headless
Service with many pods resolves to all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster.api import ApiClient, Json
from tests.e2e.cluster.informer import Informer

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_CHUNK_BYTES = 1 << 16
_SERVICE_LABEL = "kubernetes.io/service-name"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One ready pod behind a Service."""

    address: str
    hostname: str
    ports: tuple[tuple[str, int], ...]
    """Number by name of the Service's port."""


@dataclass(frozen=True, slots=True)
class _PodHosts:
    file: Path
    namespace: str
    head: str


class ServiceNetwork:
    """Keeps hosts files and proxies in step with the Services of a cluster.

    Args:
        api: Client of an administrator.
        version: Of the server.
        network: The addresses that this machine can listen at, without setting them up.
        on_change: Called once hosts files have changed.
    """

    def __init__(
        self,
        api: ApiClient,
        version: tuple[int, int],
        *,
        network: str = "127.0.0.0/8",
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        slices = "v1" if version >= (1, 21) else "v1beta1"
        self._lock = threading.Lock()
        self._pods: dict[str, _PodHosts] = {}
        self._proxies = _Proxies()
        self._network = ipaddress.ip_network(network)
        self._on_change = on_change
        self._services = Informer(api, "/api/v1/services", self._changed)
        self._slices = Informer(
            api, f"/apis/discovery.k8s.io/{slices}/endpointslices", self._changed
        )

    def start(self) -> None:
        self._proxies.start()
        self._services.start()
        self._slices.start()

    def stop(self) -> None:
        self._services.stop()
        self._slices.stop()
        self._proxies.stop()

    def add_pod(self, uid: str, namespace: str, address: str, hostname: str, file: Path) -> None:
        """Write a pod's hosts file, and keep it current from now on."""
        head = f"127.0.0.1 localhost\n{address} {hostname}\n"
        with self._lock:
            self._pods[uid] = _PodHosts(file, namespace, head)
        self._write()

    def remove_pod(self, uid: str) -> None:
        """Leave a pod's file alone from now on."""
        with self._lock:
            self._pods.pop(uid, None)

    def _changed(self, kind: str, item: Json) -> None:
        self._write()

    def _write(self) -> None:
        with self._lock:
            services = list(self._services.objects.values())
            endpoints = self._endpoints()
            self._proxies.set(_routes(services, endpoints, self._network))
            entries = list(_entries(services, endpoints))
            for pod in self._pods.values():
                _write_in_place(pod.file, pod.head + _render(entries, pod.namespace))
        self._on_change()

    def _endpoints(self) -> dict[tuple[str, str], list[Endpoint]]:
        found: dict[tuple[str, str], list[Endpoint]] = {}
        for entry in list(self._slices.objects.values()):
            metadata = entry["metadata"]
            service = metadata.get("labels", {}).get(_SERVICE_LABEL)
            if service is None:
                continue
            ports = tuple((p.get("name") or "", int(p["port"])) for p in entry.get("ports") or [])
            for endpoint in entry.get("endpoints") or []:
                if endpoint.get("conditions", {}).get("ready") is not False:
                    found.setdefault((metadata["namespace"], service), []).append(
                        Endpoint(endpoint["addresses"][0], endpoint.get("hostname") or "", ports)
                    )
        return found


Route = tuple[str, int]


def _routes(
    services: list[Json],
    endpoints: dict[tuple[str, str], list[Endpoint]],
    network: ipaddress.IPv4Network | ipaddress.IPv6Network,
) -> dict[Route, list[Route]]:
    """Return, by address and port of a Service, the addresses and ports of its pods."""
    routes: dict[Route, list[Route]] = {}
    for service in services:
        address = service["spec"].get("clusterIP") or "None"
        if address == "None" or ipaddress.ip_address(address) not in network:
            continue
        behind = endpoints.get((service["metadata"]["namespace"], service["metadata"]["name"]), [])
        for port in service["spec"].get("ports", []):
            routes[address, int(port["port"])] = sorted(
                (endpoint.address, number)
                for endpoint in behind
                for name, number in endpoint.ports
                if name == port.get("name", "")
            )
    return routes


def _entries(
    services: list[Json], endpoints: dict[tuple[str, str], list[Endpoint]]
) -> Iterator[tuple[str, str, str]]:
    """Yield address, name without a domain, and namespace."""
    for service in services:
        namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
        address = service["spec"].get("clusterIP")
        if address and address != "None":
            yield address, name, namespace
            continue
        for endpoint in endpoints.get((namespace, name), []):
            yield endpoint.address, name, namespace
            if endpoint.hostname:
                yield endpoint.address, f"{endpoint.hostname}.{name}", namespace


def _render(entries: list[tuple[str, str, str]], namespace: str) -> str:
    lines = []
    for address, name, of in sorted(entries):
        full = f"{name}.{of}"
        names = [f"{full}.svc.cluster.local", f"{full}.svc", full, *([name] * (of == namespace))]
        lines.append(f"{address} {' '.join(names)}\n")
    return "".join(lines)


def _write_in_place(file: Path, text: str) -> None:
    """Change a file that is mounted somewhere, so must stay the same file.

    One write, and never shorter than before: a reader meets no half of it.
    """
    size = file.stat().st_size if file.exists() else 0
    data = text.encode()
    with file.open("r+b" if size else "wb", buffering=0) as target:
        target.write(data + b"\n" * (size - len(data)))


class _Proxies:
    """Listens at the addresses of Services; a thread with an event loop of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        self._routes: dict[Route, list[Route]] = {}
        self._servers: dict[Route, asyncio.Server] = {}
        self._turns = itertools.count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._update_lock = asyncio.Lock()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def set(self, routes: dict[Route, list[Route]]) -> None:
        """Listen where routes begin, and nowhere else; returns when that is so."""
        asyncio.run_coroutine_threadsafe(self._update(routes), self._loop).result(10)

    async def _update(self, routes: dict[Route, list[Route]]) -> None:
        async with self._update_lock:
            self._routes = routes
            for gone in self._servers.keys() - routes.keys():
                self._servers.pop(gone).close()
            for route in routes.keys() - self._servers.keys():
                try:
                    server = await asyncio.start_server(
                        functools.partial(self._accept, route),
                        *route,
                    )
                except OSError as error:
                    logger.warning("no Service can listen at %s:%d: %s", *route, error)
                    continue
                self._servers[route] = server

    async def _close(self) -> None:
        await self._update({})
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(
        self, route: Route, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._carry(self._routes.get(route, []), reader, writer)
        except (OSError, TimeoutError):
            writer.transport.abort()
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _carry(
        self, targets: list[Route], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if not targets:
            writer.transport.abort()
            return
        target = targets[next(self._turns) % len(targets)]
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            far_reader, far_writer = await asyncio.open_connection(*target)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_pump(reader, far_writer))
                group.create_task(_pump(far_reader, writer))
        except* OSError:
            writer.transport.abort()
        finally:
            far_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    with contextlib.suppress(OSError):
        writer.write_eof()
