"""A kubelet for many fake nodes whose pods are processes of this machine.

What differs from containers, because a loopback network replaces that of pods:

* A pod listens on its own address only (`status.podIP`, by the downward API). `0.0.0.0` would take
  the port from every other pod.
* Images are entry points in a table; their files are this machine's, below a layer of the pod's.
* Services work for one such kubelet at a time: the first one listens at their addresses.
* Resources are what the scheduler accounts for; nothing limits a process. Security contexts are not
  applied.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from tests.e2e.cluster import container
from tests.e2e.cluster.api import Json, path
from tests.e2e.cluster.binaries import UnavailableError
from tests.e2e.cluster.claims import ClaimProvisioner
from tests.e2e.cluster.informer import Informer
from tests.e2e.cluster.instant import Ending, InstantPods, Outcome
from tests.e2e.cluster.log_server import LogServer
from tests.e2e.cluster.nodes import FakeNode, node_object, ready_condition, unreachable_taints
from tests.e2e.cluster.pod_worker import Host, PodWorker
from tests.e2e.cluster.runner import ContainerRunner, Image
from tests.e2e.cluster.services import ServiceNetwork

if TYPE_CHECKING:
    from tests.e2e.cluster.cluster import TestCluster

_NUM_PROBE_THREADS = 16
_JOIN_TIMEOUT_S = 15.0


class Kubelet:
    """Nodes and their pods, for as long as the context lasts; pods that are left are killed.

    Args:
        cluster: Where the nodes are registered.
        nodes: The first nodes; `add_node` adds others.
        images: By image name without tag or digest: an entry point, or an `Image`.
        instant: Start no processes: pods run (True) or end (`Outcome`) as soon as they are bound.
        ending: How long an instant pod takes to end once it is deleted.
        backoff_s: Wait before the first restart of a container; 10 s in a cluster.
    """

    def __init__(
        self,
        cluster: TestCluster,
        nodes: Sequence[FakeNode] = (),
        *,
        images: Mapping[str, Sequence[str] | Image] | None = None,
        instant: bool | Outcome = False,
        ending: Ending = lambda _: 0.0,
        backoff_s: float = 0.5,
    ) -> None:
        self._cluster = cluster
        self._api = cluster.api
        self._first_nodes = list(nodes)
        self._nodes: dict[str, FakeNode] = {}
        self._silent: set[str] = set()
        self._lock = threading.RLock()
        self._workers: dict[str, PodWorker] = {}
        self._closing = contextlib.ExitStack()
        assert cluster.addresses is not None, "pods that are processes need addresses of loopback"
        self._addresses = cluster.addresses
        self._address = self._addresses.node
        self._port = 0
        self._folder = cluster.new_folder("pods")
        self._pods = Informer(
            self._api, "/api/v1/pods", self._on_pod, {"fieldSelector": "spec.nodeName!="}
        )
        self._instant: InstantPods | None = None
        self._host: Host | None = None
        if instant:
            outcome: Outcome = (lambda _: None) if instant is True else instant
            self._instant = InstantPods(self._api, self._addresses.next_pod, outcome, ending)
            self._closing.callback(self._instant.close)
        else:
            self._host = self._make_host(images or {}, backoff_s)

    def __enter__(self) -> Self:
        try:
            for node in self._first_nodes:
                self.add_node(node)
            self._pods.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill every process, delete what is left of the pods, then the nodes."""
        self._pods.stop()
        with self._lock:
            workers, names = list(self._workers.values()), list(self._nodes)
        for worker in workers:
            worker.set_present(True)
            worker.forget()
        for worker in workers:
            worker.join(_JOIN_TIMEOUT_S)
        for name in names:
            for pod in self._api.list("/api/v1/pods", fieldSelector=f"spec.nodeName={name}"):
                metadata = pod["metadata"]
                url = path("v1", "pods", metadata["namespace"], metadata["name"])
                self._api.delete(url, grace_s=0, uid=metadata["uid"])
            self._api.delete(f"/api/v1/nodes/{name}")
        self._closing.close()

    def add_node(self, node: FakeNode) -> None:
        """Register a node that is ready."""
        with self._lock:
            self._nodes[node.name] = node
        self._api.create("/api/v1/nodes", node_object(node, self._address, self._port))

    def lose_node(self, name: str, *, freeze: bool = False) -> None:
        """Make a node unreachable, as the node controller does when a kubelet falls silent.

        Nothing is reported for its pods any more, and deleting them does not end.

        Args:
            name: The node.
            freeze: Leave its processes running: cut off, not dead.
        """
        with self._lock:
            self._silent.add(name)
            workers = self._workers_of(name)
        for worker in workers:
            worker.set_present(False)
            if not freeze:
                worker.kill()
        self._set_ready(name, "Unknown")
        for pod in self._api.list("/api/v1/pods", fieldSelector=f"spec.nodeName={name}"):
            metadata = pod["metadata"]
            url = path("v1", "pods", metadata["namespace"], metadata["name"], "status")
            condition = {"type": "Ready", "status": "False", "reason": "NodeNotReady"}
            if any(c["type"] == "Ready" for c in pod["status"].get("conditions", [])):
                self._api.patch(url, {"status": {"conditions": [condition]}}, kind="strategic")

    def return_node(self, name: str) -> None:
        """Let a lost node speak again: it reports its pods, and ends those deleted meanwhile."""
        with self._lock:
            self._silent.discard(name)
            workers = self._workers_of(name)
        self._set_ready(name, "True")
        for worker in workers:
            worker.set_present(True)
        for pod in list(self._pods.objects.values()):
            if pod["spec"]["nodeName"] == name:
                self._on_pod("MODIFIED", pod)

    def cordon(self, name: str, *, on: bool = True) -> None:
        """Let nothing further be scheduled on a node, or let it again."""
        self._api.patch(f"/api/v1/nodes/{name}", {"spec": {"unschedulable": on}})

    def logs(self, namespace: str, pod: str, container: str = "", *, previous: bool = False) -> str:
        """Return what a container wrote since its latest start, or up to it.

        Empty for a pod that has not come yet; what a pod wrote outlives it.
        """
        with self._lock:
            if not any(worker.key == (namespace, pod) for worker in self._workers.values()):
                return ""
        file = self._runner(namespace, pod, container).log(previous=previous)
        return file.read_text(errors="replace") if file.exists() else ""

    def pid(self, namespace: str, pod: str, container: str = "") -> int:
        """Return the process id, on this machine, of a running container's first process."""
        running = self._runner(namespace, pod, container).container
        if running is None or (pid := running.pid) is None:
            raise ProcessLookupError(f"no container of pod {pod} runs")
        return pid

    def end_pod(self, namespace: str, name: str, exit_code: int, message: str = "") -> None:
        """End an instant pod: Succeeded for 0, else Failed."""
        assert self._instant is not None, "processes end by themselves"
        self._instant.end(self._api.get(path("v1", "pods", namespace, name)), exit_code, message)

    def _on_pod(self, kind: str, pod: Json) -> None:
        uid, node = pod["metadata"]["uid"], pod["spec"]["nodeName"]
        with self._lock:
            if node not in self._nodes:
                return
            is_silent = node in self._silent
            worker = self._workers.get(uid)
            if self._instant is not None:
                if kind == "DELETED":
                    self._instant.forget(uid)
                elif not is_silent:
                    self._instant.update(pod)
                return
            if worker is not None:
                worker.forget() if kind == "DELETED" else worker.update(pod)
            elif kind != "DELETED" and not is_silent:
                assert self._host is not None
                worker = PodWorker(self._host, pod, self._addresses.next_pod())
                self._workers[uid] = worker
                worker.start()

    def _set_ready(self, name: str, status: str) -> None:
        taints = [*self._nodes[name].taints, *(unreachable_taints() if status != "True" else [])]
        self._api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": taints}})
        conditions = {"status": {"conditions": [ready_condition(status)]}}
        self._api.patch(f"/api/v1/nodes/{name}/status", conditions, kind="strategic")

    def _workers_of(self, node: str) -> list[PodWorker]:
        return [worker for worker in self._workers.values() if worker.node == node]

    def _runner(self, namespace: str, pod: str, container: str) -> ContainerRunner:
        with self._lock:
            found = [w for w in self._workers.values() if w.key == (namespace, pod)]
        if not found:
            raise KeyError(f"no pod {namespace}/{pod} was here")
        return found[-1].runner(container)

    def _find_log(
        self, namespace: str, pod: str, container: str, previous: bool
    ) -> tuple[Path, Callable[[], bool]]:
        runner = self._runner(namespace, pod, container)
        return runner.log(previous=previous), lambda: runner.container is not None

    def _make_host(self, images: Mapping[str, Sequence[str] | Image], backoff_s: float) -> Host:
        if reason := container.why_unusable():
            raise UnavailableError(reason)
        if authority := self._cluster.authority:
            serving = authority.issue("kubelet", addresses=[self._address])
            server = LogServer(self._address, authority, serving, self._find_log)
            server.start()
            self._closing.callback(server.stop)
            self._port = server.port
        services = ServiceNetwork(self._api, self._cluster.version)
        services.start()
        self._closing.callback(services.stop)
        claims = ClaimProvisioner(self._api, self._folder / "claims")
        claims.start()
        self._closing.callback(claims.stop)
        executor = ThreadPoolExecutor(_NUM_PROBE_THREADS, thread_name_prefix="probe")
        self._closing.callback(executor.shutdown)
        address, _, port = self._api.server.removeprefix("https://").rpartition(":")
        return Host(
            api=self._api,
            folder=self._folder,
            images={
                name: image if isinstance(image, Image) else Image(entrypoint=image)
                for name, image in images.items()
            },
            services=services,
            executor=executor,
            backoff_s=backoff_s,
            base_environment={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "HOME": "/root",
                "KUBERNETES_SERVICE_HOST": address,
                "KUBERNETES_SERVICE_PORT": port,
            },
            node_address=self._address,
        )
