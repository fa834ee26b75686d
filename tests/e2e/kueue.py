"""A stand-in for Kueue beside the cluster: its definitions, and a thread that plays its part."""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import yaml

from tests.e2e.cluster import ApiError, Json, TestCluster, path
from tests.fakes.kueue_admitter import FakeQueue, KueueAdmitter

KUEUE = "kueue.x-k8s.io/v1beta2"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_CRDS = Path(__file__).parents[1] / "fakes" / "kueue_crds.yaml"
_PAUSE_S = 0.2


class FakeKueue:
    """What a test sees of it.

    Attributes:
        admitter: Decides; its queues may be changed by `set_queue`.
    """

    def __init__(self, cluster: TestCluster, namespace: str, admitter: KueueAdmitter) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self.admitter = admitter

    def workload(self, job: str) -> Json:
        """Return the Workload of a job; empty if there is none."""
        for body in self._cluster.api.list(path(KUEUE, "workloads", self._namespace)):
            if body["metadata"]["ownerReferences"][0]["name"] == job:
                return body
        return {}

    def patch(self, job: str, spec: Json) -> None:
        """Change the spec of the Workload of a job, as its operators do."""
        name = self.workload(job)["metadata"]["name"]
        self._cluster.api.patch(path(KUEUE, "workloads", self._namespace, name), {"spec": spec})

    def submit(self, job: str, queue: str, spec: Json, labels: Mapping[str, str] = {}) -> None:
        """Create a job with the label of a queue."""
        url = path("tinsmith.dev/v1alpha1", "trainingjobs", self._namespace)
        metadata = {"name": job, "labels": {QUEUE_LABEL: queue, **labels}}
        body = {"apiVersion": "tinsmith.dev/v1alpha1", "kind": "TrainingJob", "metadata": metadata}
        self._cluster.api.create(url, {**body, "spec": spec})

    def step(self) -> None:
        """Decide once about all Workloads of the namespace."""
        url = path(KUEUE, "workloads", self._namespace)
        for body in self.admitter.step(self._cluster.api.list(url)):
            target = path(KUEUE, "workloads", self._namespace, body["metadata"]["name"], "status")
            # What was changed meanwhile is decided about in the next step.
            with contextlib.suppress(ApiError):
                self._cluster.api.replace(target, body)


def install_kueue(cluster: TestCluster) -> None:
    """Install Kueue's definitions, and wait until they are served."""
    names = [body["metadata"]["name"] for body in yaml.safe_load_all(_CRDS.read_text())]
    cluster.kubectl("apply", "--validate=false", "-f", str(_CRDS))
    definitions = path("apiextensions.k8s.io/v1", "customresourcedefinitions")

    def are_served() -> bool:
        found = [cluster.api.get(f"{definitions}/{name}").get("status", {}) for name in names]
        return all(
            ("Established", "True")
            in {(entry["type"], entry["status"]) for entry in status.get("conditions") or []}
            for status in found
        )

    cluster.wait_for(are_served, "Kueue's definitions to be served")


@contextlib.contextmanager
def playing_kueue(
    cluster: TestCluster,
    namespace: str,
    queues: Mapping[str, FakeQueue],
    flavors: Iterable[Json],
) -> Iterator[FakeKueue]:
    """Yield what plays Kueue in a namespace; the flavors are there as long as it does."""
    flavors = list(flavors)
    url = path(KUEUE, "resourceflavors")
    for flavor in flavors:
        body = {"apiVersion": KUEUE, "kind": "ResourceFlavor", **flavor}
        cluster.api.create(url, body)
    admitter = KueueAdmitter(queues, flavors, lambda: datetime.datetime.now(datetime.UTC))
    kueue = FakeKueue(cluster, namespace, admitter)
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(_PAUSE_S):
            kueue.step()

    thread = threading.Thread(target=run, name="kueue", daemon=True)
    thread.start()
    try:
        yield kueue
    finally:
        stopped.set()
        thread.join()
        for flavor in flavors:
            cluster.api.delete(f"{url}/{flavor['metadata']['name']}")
