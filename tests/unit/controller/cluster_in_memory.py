"""A cluster in memory: an API server with versions, a scheduler of pods, and a bad network.

No thread, and no clock but `World.now_s`. Revisions are one counter, as in etcd. The test that
drives a `Connection` says which request or answer is lost, and when a late write lands.
"""

from __future__ import annotations

import datetime
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

from tinsmith_controller.kube.api_client import (
    JOBS,
    NODES,
    PODS,
    POOLS,
    PRIORITY_CLASSES,
    RESOURCE_FLAVORS,
    WORKLOAD_PRIORITY_CLASSES,
    WORKLOADS,
    ApiError,
    Json,
    Resource,
)

NAMESPACE = "team-a"
GPU = "nvidia.com/gpu"
START = datetime.datetime(2026, 11, 26, 21, 23, 37, tzinfo=datetime.UTC)
WATCHED = {resource.plural: resource for resource in (JOBS, POOLS, PODS, NODES, PRIORITY_CLASSES)}
WATCHED_OF_KUEUE = {
    resource.plural: resource
    for resource in (RESOURCE_FLAVORS, WORKLOAD_PRIORITY_CLASSES, WORKLOADS)
}
SMALL = {"requests": {"cpu": "100m", "memory": "64Mi"}}

ObjectKey = tuple[str, str]
"""Namespace, name."""
Fault = Callable[[str, str, str], str]
"""Says of a method, plural and name what happens to a request: see `Connection`."""


def clone(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value, -1))


class World:
    """What the API server has, the changes that it tells, and the rest of the cluster.

    What is stored is shared with all that it is told to, and never changed: a change stores a new
    object.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.revision = 100
        self.objects: dict[str, dict[ObjectKey, Json]] = {}
        """By plural, then by name."""
        self.changes: dict[str, list[tuple[int, str, Json]]] = {
            name: [] for name in (*WATCHED, *WATCHED_OF_KUEUE)
        }
        self.trace: list[str] = []
        self.refused_nodes: set[str] = set()
        """Nodes that the cluster's scheduler finds unfit, for reasons of its own."""
        self.silent_pods: set[str] = set()
        """Names of pods that their kubelet does not start, and says nothing about."""
        self.listeners: list[Callable[[str, Json | None, Json], None]] = []
        self._uids = itertools.count(1)

    def say(self, text: str) -> None:
        self.trace.append(f"{self.now_s:7.2f}s r{self.revision} {text}")

    def now(self) -> datetime.datetime:
        return START + datetime.timedelta(seconds=self.now_s)

    def stamp(self) -> str:
        return self.now().strftime("%Y-%m-%dT%H:%M:%SZ")

    # The API server.

    def store(self, plural: str, namespace: str, body: Json, kind: str = "MODIFIED") -> Json:
        self.revision += 1
        own = {"namespace": namespace, "resourceVersion": str(self.revision)}
        body = {**body, "metadata": body["metadata"] | own}
        key = (namespace, body["metadata"]["name"])
        stored = self.objects.setdefault(plural, {})
        before = stored.get(key)
        if kind == "DELETED":
            stored.pop(key, None)
        else:
            stored[key] = body
        if plural in self.changes:
            self.changes[plural].append((self.revision, kind, body))
        for listener in self.listeners:
            listener(plural, before, body)
        return body

    def create(self, plural: str, namespace: str, body: Json) -> Json:
        if self.has(plural, namespace, body["metadata"]["name"]):
            raise ApiError(409, "AlreadyExists", "there is one")
        own = {
            "uid": f"uid-{next(self._uids)}",
            "generation": 1,
            "creationTimestamp": self.stamp(),
        }
        body = {**body, "metadata": body["metadata"] | own}
        if plural == "pods":
            body.setdefault("status", {"phase": "Pending"})
        return self.store(plural, namespace, body, "ADDED")

    def replace(self, plural: str, namespace: str, body: Json, subresource: str) -> Json:
        old = self.stored(plural, namespace, body["metadata"]["name"])
        if body["metadata"].get("resourceVersion") != old["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "changed")
        if subresource != "status":
            return self.store(plural, namespace, body)
        if old.get("status") == body.get("status"):
            return old
        return self.store(plural, namespace, {**old, "status": body["status"]})

    def patch(self, plural: str, namespace: str, name: str, body: Json) -> Json:
        """Merge the fields of a spec, if the object is the one of a uid and version."""
        old = self.stored(plural, namespace, name)
        if any(old["metadata"][key] != value for key, value in body["metadata"].items()):
            raise ApiError(409, "Conflict", "changed")
        spec = {**old["spec"], **body["spec"]}
        if spec == old["spec"]:
            return old
        metadata = {**old["metadata"], "generation": old["metadata"]["generation"] + 1}
        return self.store(plural, namespace, {**old, "metadata": metadata, "spec": spec})

    def has(self, plural: str, namespace: str, name: str) -> bool:
        return (namespace, name) in self.objects.get(plural, {})

    def stored(self, plural: str, namespace: str, name: str) -> Json:
        found = self.objects.get(plural, {}).get((namespace, name))
        if found is None:
            raise ApiError(404, "NotFound", "gone")
        return found

    def get(self, plural: str, namespace: str, name: str) -> Json:
        """Return a copy, which a test may change."""
        return clone(self.stored(plural, namespace, name))

    def delete(
        self, plural: str, namespace: str, name: str, uid: str = "", *, at_once: bool = False
    ) -> Json:
        old = self.stored(plural, namespace, name)
        if uid and old["metadata"]["uid"] != uid:
            raise ApiError(404, "NotFound", "another one")
        if plural == "pods" and not at_once and old["spec"].get("nodeName"):
            if "deletionTimestamp" in old["metadata"]:
                return old
            ending = old["metadata"] | {"deletionTimestamp": self.stamp()}
            return self.store(plural, namespace, {**old, "metadata": ending})
        return self.store(plural, namespace, old, "DELETED")

    def of(self, plural: str) -> list[Json]:
        return list(self.objects.get(plural, {}).values())

    # People and operators.

    def node(self, name: str, gpus: int = 8, *, is_ready: bool = True) -> None:
        ready = {
            "type": "Ready",
            "status": "True" if is_ready else "Unknown",
            "lastTransitionTime": self.stamp(),
        }
        status = {
            "allocatable": {"cpu": "64", "memory": "512Gi", "pods": "110", GPU: str(gpus)},
            "conditions": [ready],
        }
        body = {"metadata": {"name": name, "uid": f"node-{name}"}, "spec": {}, "status": status}
        self.store("nodes", "", body)

    def priority_class(self, name: str, value: int) -> None:
        self.store(PRIORITY_CLASSES.plural, "", {"metadata": {"name": name}, "value": value})

    def job(
        self, name: str, trainers: int = 1, gpus: int = 8, samplers: int = 0, **scheduling: Any
    ) -> None:
        roles: Json = {
            "trainer": {"replicas": trainers, "gpus": gpus, "resources": SMALL},
            "driver": {"template": {"command": ["drive"]}, "resources": SMALL},
        }
        if samplers:
            roles["sampler"] = {"replicas": samplers, "gpus": 1, "resources": SMALL}
        spec = {
            "method": {"type": "custom"},
            "model": {"name": "tiny", "source": "file:///models/tiny"},
            "roles": roles,
            "scheduling": {"preemptionGraceSeconds": 5, **scheduling},
        }
        self._create_workload("trainingjobs", "TrainingJob", name, spec)

    def pool(self, name: str, replicas: int, gpus: int) -> None:
        spec = {
            "model": {"name": "tiny", "source": "file:///models/tiny"},
            "trainer": {"replicas": replicas, "gpus": gpus, "resources": SMALL},
        }
        self._create_workload("trainerpools", "TrainerPool", name, spec)

    def edit(self, plural: str, name: str, **fields: Any) -> None:
        """Change fields of a spec, as `kubectl edit` does."""
        body = self.get(plural, NAMESPACE, name)
        body["spec"] |= fields
        body["metadata"]["generation"] += 1
        self.store(plural, NAMESPACE, body)

    def edit_trainer(self, name: str, **fields: Any) -> None:
        roles = self.get("trainingjobs", NAMESPACE, name)["spec"]["roles"]
        self.edit("trainingjobs", name, roles={**roles, "trainer": roles["trainer"] | fields})

    def foreign_pod(self, name: str, node: str, gpus: int) -> None:
        """Make a pod of another owner, which is there at once."""
        container = {"resources": {"limits": {GPU: str(gpus)}}}
        spec = {"nodeName": node, "containers": [container]}
        status = {"phase": "Running"}
        self.create("pods", NAMESPACE, {"metadata": {"name": name}, "spec": spec, "status": status})

    def _create_workload(self, plural: str, kind: str, name: str, spec: Json) -> None:
        body = {"apiVersion": "tinsmith.dev/v1alpha1", "kind": kind, "metadata": {"name": name}}
        self.create(plural, NAMESPACE, {**body, "spec": spec})

    # The cluster's scheduler and the kubelets.

    def is_ready(self, node: str) -> bool:
        body = self.objects.get("nodes", {}).get(("", node))
        return body is not None and body["status"]["conditions"][0]["status"] == "True"

    def capacity(self) -> dict[str, int]:
        return {
            body["metadata"]["name"]: int(body["status"]["allocatable"][GPU])
            for body in self.of("nodes")
        }

    def assigned(self) -> dict[str, int]:
        """Return the GPUs of each node that statuses assign: the truth, not a copy."""
        found: dict[str, int] = {}
        for body in [*self.of("trainingjobs"), *self.of("trainerpools")]:
            for entry in body.get("status", {}).get("assignments", []):
                if entry.get("node"):
                    found[entry["node"]] = found.get(entry["node"], 0) + entry["gpus"]
        return found

    def used(self) -> dict[str, int]:
        """Return the GPUs of each node that pods have."""
        found: dict[str, int] = {}
        for pod in self.of("pods"):
            if holds_gpus(pod):
                node = pod["spec"]["nodeName"]
                found[node] = found.get(node, 0) + gpus_of(pod)
        return found

    def advance(self, pod: Json) -> None:
        """Do what scheduler and kubelet do next with a pod."""
        node = pod["spec"].get("nodeName", "")
        if not node:
            self._bind(pod)
        elif not self.is_ready(node):
            return
        elif "deletionTimestamp" in pod["metadata"]:
            self.delete("pods", NAMESPACE, pod["metadata"]["name"], at_once=True)
        elif pod["metadata"]["name"] in self.silent_pods:
            return
        elif pod["status"]["phase"] == "Pending":
            ready = {"type": "Ready", "status": "True"}
            self._set_status(pod, {"phase": "Running", "conditions": [ready]})

    def succeed(self, pod: Json) -> None:
        state = {"terminated": {"exitCode": 0, "reason": "Completed"}}
        ended = [{"name": "driver", "state": state}]
        self._set_status(pod, {"phase": "Succeeded", "containerStatuses": ended})

    def _bind(self, pod: Json) -> None:
        allowed = _nodes_of(pod) or list(self.capacity())
        capacity, used = self.capacity(), self.used()
        for name in allowed:
            has_room = capacity.get(name, 0) - used.get(name, 0) >= gpus_of(pod)
            if has_room and self.is_ready(name) and name not in self.refused_nodes:
                self.store("pods", NAMESPACE, {**pod, "spec": pod["spec"] | {"nodeName": name}})
                return
        if not pod["status"].get("conditions"):
            refused = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": f"1 Insufficient {GPU}",
                "lastTransitionTime": self.stamp(),
            }
            self._set_status(pod, {"phase": "Pending", "conditions": [refused]})

    def _set_status(self, pod: Json, status: Json) -> None:
        self.store("pods", NAMESPACE, {**pod, "status": status})


def gpus_of(pod: Json) -> int:
    limits = [each.get("resources", {}).get("limits", {}) for each in pod["spec"]["containers"]]
    return sum(int(each.get(GPU, 0)) for each in limits)


def holds_gpus(pod: Json) -> bool:
    is_bound = bool(pod["spec"].get("nodeName"))
    return is_bound and pod["status"].get("phase") not in ("Succeeded", "Failed")


def _nodes_of(pod: Json) -> list[str]:
    affinity = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    rule = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    terms = rule.get("nodeSelectorTerms")
    return list(terms[0]["matchFields"][0]["values"]) if terms else []


class Connection:
    """What one process sees of the API server.

    `fault` is asked before each request. It returns an empty text if all is well, and `request` if
    the request is lost. `answer` stands for one that is done and not answered. `late` stands for
    one that is not answered and stays under way until `land`.
    """

    def __init__(self, world: World, fault: Fault = lambda method, plural, name: "") -> None:
        self.world = world
        self.fault = fault
        self.num_writes = 0
        self.under_way: list[tuple[str, Callable[[], Json]]] = []

    def get(self, resource: Resource, namespace: str, name: str) -> Json:
        if self.fault("GET", resource.plural, name):
            raise ApiError(0, "Unreachable", "cut")
        return self.world.stored(resource.plural, namespace, name)

    def list(self, resource: Resource, namespace: str = "") -> tuple[list[Json], str]:
        return self.world.of(resource.plural), str(self.world.revision)

    def watch(
        self, resource: Resource, namespace: str, version: str, *, timeout_s: int
    ) -> Iterator[tuple[str, Json]]:
        raise AssertionError("a test delivers changes itself")

    def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        return self._write(
            "POST",
            resource.plural,
            body["metadata"]["name"],
            lambda: self.world.create(resource.plural, namespace, body),
        )

    def replace(
        self, resource: Resource, namespace: str, body: Json, *, subresource: str = ""
    ) -> Json:
        return self._write(
            "PUT",
            resource.plural,
            body["metadata"]["name"],
            lambda: self.world.replace(resource.plural, namespace, body, subresource),
        )

    def patch(self, resource: Resource, namespace: str, name: str, body: Json) -> Json:
        return self._write(
            "PATCH",
            resource.plural,
            name,
            lambda: self.world.patch(resource.plural, namespace, name, body),
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
        try:
            return self._write(
                "DELETE",
                resource.plural,
                name,
                lambda: self.world.delete(resource.plural, namespace, name, uid),
            )
        except ApiError as error:
            if error.is_not_found:
                return None
            raise

    def land(self) -> None:
        """Let the write arrive that is under way for the longest time."""
        what, act = self.under_way.pop(0)
        try:
            act()
            self.world.say(f"   {what}: arrived late, done")
        except ApiError as error:
            self.world.say(f"   {what}: arrived late, {error.reason}")

    def _write(self, method: str, plural: str, name: str, act: Callable[[], Json]) -> Json:
        self.num_writes += 1
        what = f"{method} {plural} {name}"
        fault = self.fault(method, plural, name)
        if fault == "late":
            self.under_way.append((what, act))
        answer = act() if fault not in ("request", "late") else {}
        if fault:
            self.world.say(f"   {what}: {fault}")
            raise ApiError(0, "Unreachable", "cut")
        return answer
