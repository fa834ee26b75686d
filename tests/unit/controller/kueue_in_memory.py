"""Jobs in queues of Kueue over a cluster in memory, with a stand-in for Kueue."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fakes.kueue_admitter import FakeQueue, KueueAdmitter
from tests.unit.controller.cluster_in_memory import GPU, NAMESPACE, Connection, Fault, World
from tests.unit.controller.process_in_memory import DEPLOYMENT, Process, status_of

from tinsmith_controller.kube.api_client import Json
from tinsmith_controller.kueue.names import PRIORITY_LABEL, QUEUE_LABEL
from tinsmith_controller.pods.author_policy import AuthorPolicy
from tinsmith_controller.pods.job_refusal import refusal_of

QUEUE = "research"
QUOTA = {"cpu": "100", "memory": "1Ti", GPU: "8"}
NODE_LABEL = "example.com/kind"
TAINT = {"key": "example.com/kind", "value": "fast", "effect": "NoSchedule"}


class NoWriteLeft(BaseException):
    """The process was killed before a write."""


class KueueCluster:
    """Two nodes of a flavor each, a queue with quota in both, and a controller.

    Args:
        quotas: Quota by flavor, in the order in which flavors are tried.
    """

    def __init__(self, quotas: Mapping[str, Mapping[str, str]] | None = None) -> None:
        self.world = World()
        self.flavors = [self._flavor("slow"), self._flavor("fast")]
        tolerated = {"operator": "Equal", **TAINT}
        self.flavors[1]["spec"]["tolerations"] = [tolerated]
        for flavor in self.flavors:
            self.world.create("resourceflavors", "", flavor)
            self._node(flavor["metadata"]["name"])
        queue = FakeQueue(quotas=quotas or {"fast": QUOTA})
        self.admitter = KueueAdmitter({QUEUE: queue}, self.flavors, self.world.now)
        self.process = self.start()

    def start(
        self, fault: Fault = lambda method, plural, name: "", *, queues: Path | None = None
    ) -> Process:
        """Begin with another process."""
        deployment = replace(DEPLOYMENT, author_policy=AuthorPolicy(has_kueue=True))
        self.process = Process(
            self.world,
            Connection(self.world, fault),
            queues=queues,
            check=functools.partial(refusal_of, deployment),
            has_kueue=True,
        )
        return self.process

    def submit(self, name: str, *, queue: str = QUEUE, priority: str = "", **job: Any) -> None:
        """Make a job with the label of a queue."""
        self.world.job(name, **job)
        self.label(name, {QUEUE_LABEL: queue} | ({PRIORITY_LABEL: priority} if priority else {}))

    def label(self, name: str, labels: dict[str, str]) -> None:
        """Give a job labels in the place of all it has."""
        body = self.world.get("trainingjobs", NAMESPACE, name)
        body["metadata"]["labels"] = labels
        self.world.store("trainingjobs", NAMESPACE, body)

    def settle(self, num_rounds: int = 12) -> None:
        """Let the cluster, Kueue and the controller do all that is due."""
        for _ in range(num_rounds):
            self.process.settle(1)
            self.step_kueue()

    def step_kueue(self) -> None:
        """Let Kueue decide once."""
        for body in self.admitter.step(self.world.of("workloads")):
            self.world.replace("workloads", NAMESPACE, body, "status")

    def set_queue(self, **changes: Any) -> None:
        """Change the queue."""
        before = self.admitter.queues[QUEUE]
        self.admitter.queues[QUEUE] = FakeQueue(**{**vars(before), **changes})

    def edit_workload(self, name: str, **spec: Any) -> None:
        """Change the spec of the Workload of a job, as its operators do."""
        body = self.workload(name)
        self.world.store("workloads", NAMESPACE, {**body, "spec": {**body["spec"], **spec}})

    def workload(self, job: str) -> Json:
        """Return the one Workload of a job."""
        [found] = self.workloads(job)
        return self.world.get("workloads", NAMESPACE, found)

    def workloads(self, job: str) -> list[str]:
        """Return the names of the Workloads of a job."""
        return [
            body["metadata"]["name"]
            for body in self.world.of("workloads")
            if body["metadata"]["ownerReferences"][0]["name"] == job
        ]

    def status(self, job: str) -> Json:
        """Return the status of a job."""
        return status_of(self.world, job)

    def is_suspended(self, job: str) -> bool:
        """Whether `spec.suspend` of a job is true."""
        return bool(self.world.get("trainingjobs", NAMESPACE, job)["spec"].get("suspend"))

    def nodes_of(self, job: str) -> set[str]:
        """Return the nodes that pods of a job are on."""
        return {
            pod["spec"]["nodeName"]
            for pod in self.world.of("pods")
            if pod["metadata"]["name"].startswith(f"{job}-") and pod["spec"].get("nodeName")
        }

    def end(self, job: str) -> None:
        """Let the driver of a job succeed."""
        for pod in self.world.of("pods"):
            name = pod["metadata"]["name"]
            if name.startswith(f"{job}-driver-") and pod["status"]["phase"] == "Running":
                self.world.succeed(pod)

    @staticmethod
    def _flavor(kind: str) -> Json:
        spec = {"nodeLabels": {NODE_LABEL: kind}}
        return {"kind": "ResourceFlavor", "metadata": {"name": kind}, "spec": spec}

    def _node(self, kind: str) -> None:
        self.world.node(f"node-{kind}")
        body = self.world.get("nodes", "", f"node-{kind}")
        body["metadata"]["labels"] = {NODE_LABEL: kind}
        body["spec"]["taints"] = [TAINT] if kind == "fast" else []
        self.world.store("nodes", "", body)
