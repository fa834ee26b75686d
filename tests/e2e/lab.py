"""A controller and a scheduler as processes, with nodes whose pods run at once."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from tests.e2e.cluster import FakeNode, Json, Kubelet, TestCluster, path
from tests.e2e.deployment import (
    GROUP_VERSION,
    SMALL,
    DrainedPod,
    Jobs,
    controller_process,
    scheduler_process,
)
from tests.support.pod_keys import POD_KEY
from tinsmith.v1 import job_pb2, job_pb2_grpc
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole

_CALL_TIMEOUT_S = 10.0
_GONE_TIMEOUT_S = 60.0
_PLURALS = ("trainingjobs", "trainerpools")
_BUG = "by a bug"
_ELECTED = '"event": "elected"'
TINY: Json = {"name": "tiny", "source": "file:///models/tiny"}


@dataclass(kw_only=True)
class Lab:
    """What a test of the controller works with.

    Attributes:
        cluster: The Kubernetes API.
        jobs: The jobs of its namespace.
        controller: The process; it may be killed and started again.
        scheduler: The process.
        folder: For files.
    """

    cluster: TestCluster
    jobs: Jobs
    controller: DrainedPod
    scheduler: DrainedPod
    folder: Path
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _first: int = 0

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return self.jobs.namespace

    @contextlib.contextmanager
    def nodes(
        self, count: int, *, gpus: int = 8, ending: Callable[[Json], float] = lambda _: 0.0
    ) -> Iterator[Kubelet]:
        """Yield the kubelet of fresh nodes `self.node(i)`; in the end workloads go, then nodes."""
        self._first = next(self._numbers)
        nodes = [FakeNode(name=self.node(i), gpus=gpus) for i in range(count)]
        with self.cluster.kubelet(nodes, instant=True, ending=ending) as kubelet:
            try:
                yield kubelet
            finally:
                self.clear()

    def node(self, number: int) -> str:
        """Return the name of a node of this test."""
        return f"{self.namespace}-{self._first}-n{number}"

    def clear(self) -> None:
        """Delete all jobs, pools and their pods."""
        for plural in _PLURALS:
            for item in self.cluster.api.list(self.jobs.url(plural=plural)):
                self.cluster.api.delete(self.jobs.url(item["metadata"]["name"], plural=plural))
        # What the cluster's collector would do by and by.
        for pod in self.jobs.pods():
            self.delete_now(pod)
        self.cluster.wait_for(lambda: not self.jobs.pods(), "the pods to go", _GONE_TIMEOUT_S)

    def delete_now(self, pod: Json) -> None:
        """Delete a pod without letting it end."""
        url = path("v1", "pods", self.namespace, pod["metadata"]["name"])
        self.cluster.api.delete(url, grace_s=0, uid=pod["metadata"]["uid"])

    def pod(self, job: str, role: str, index: int = 0) -> Json:
        """Return the pod that a job's status says to have a place.

        Raises:
            LookupError: If there is none.
        """
        for entry in self.jobs.status(job).get("assignments", []):
            if (entry["role"], entry["index"]) == (role, index):
                return self.cluster.api.get(path("v1", "pods", self.namespace, entry["pod"]))
        raise LookupError(f"{job} has no {role} {index}")

    def end(self, kubelet: Kubelet, job: str, role: str, exit_code: int, index: int = 0) -> str:
        """End a pod of a job; return its name."""
        name: str = self.pod(job, role, index)["metadata"]["name"]
        kubelet.end_pod(self.namespace, name, exit_code)
        return name

    def waits(self, name: str, *words: str, plural: str = "trainingjobs") -> str:
        """Return the sentence of a workload that waits, once all the words are in it."""

        def sentence() -> str:
            said = str(self.jobs.status(name, plural=plural).get("waitingFor", ""))
            return said if all(word in said for word in words) else ""

        return str(self.cluster.wait_for(sentence, f"{name} to say {words}"))

    def good_keys(self, job: str) -> list[Any]:
        """Return the keys of a job that the scheduler accepts."""
        address = self.scheduler.address
        with grpc.insecure_channel(address) as channel:
            stub: Any = job_pb2_grpc.JobServiceStub(channel)
            answer = stub.ListJobKeys(
                job_pb2.ListJobKeysRequest(page_size=1000),
                timeout=_CALL_TIMEOUT_S,
                metadata=PodCredentials.read(POD_KEY, PodRole.CONTROLLER).metadata,
            )
        return [key for key in answer.keys if key.job.rpartition("/")[2] == job and not key.revoked]

    def was_elected(self) -> bool:
        """Whether the controller, as it was started first, decides by now."""
        return _ELECTED in self.controller.log.read_text()

    def check_log(self) -> None:
        """Fail if the controller is not alive and well."""
        log = self.controller.log.read_text()
        assert self.controller.is_running, log[-4000:]
        assert _BUG not in log, log[log.index(_BUG) - 500 :][:4000]


@contextlib.contextmanager
def start_lab(cluster: TestCluster, namespace: str, folder: Path, **settings: Any) -> Iterator[Lab]:
    """Yield a lab in a namespace; the processes end with the context."""
    with _lab(cluster, namespace, folder, settings) as lab, lab.controller:
        yield lab
        lab.check_log()


@contextlib.contextmanager
def lab_at_rest(
    cluster: TestCluster, namespace: str, folder: Path, **settings: Any
) -> Iterator[tuple[Lab, Kubelet]]:
    """Yield a lab whose controller is not started yet, and the kubelet of its three nodes."""
    of_faults = {"lease_ttl_s": 2.0, "resync_interval_s": 2, "backoff_base_s": 0.5}
    with _lab(cluster, namespace, folder, {**of_faults, **settings}) as lab:
        nodes = [FakeNode(name=lab.node(i), gpus=8) for i in range(3)]
        with cluster.kubelet(nodes, instant=True) as kubelet:
            yield lab, kubelet


@contextlib.contextmanager
def _lab(
    cluster: TestCluster, namespace: str, folder: Path, settings: Mapping[str, Any]
) -> Iterator[Lab]:
    """Yield a lab whose scheduler runs."""
    with scheduler_process(folder) as scheduler:
        yield Lab(
            cluster=cluster,
            jobs=Jobs(cluster, namespace),
            controller=controller_process(
                cluster, folder, namespace, scheduler.address, **settings
            ),
            scheduler=scheduler,
            folder=folder,
        )


def training(trainers: int = 1, gpus: int = 1, samplers: int = 0, **further: Any) -> Json:
    """Return the spec of a job whose driver does nothing of itself."""
    roles: Json = {
        "trainer": {"replicas": trainers, "gpus": gpus, "resources": SMALL},
        "driver": {"template": {"command": ["drive"]}, "resources": TINIEST},
    }
    if samplers:
        roles["sampler"] = {"replicas": samplers, "gpus": 1, "resources": SMALL}
    scheduling = {"preemptionGraceSeconds": 5, **further.pop("scheduling", {})}
    spec = {
        "method": {"type": "custom"},
        "model": TINY,
        "roles": roles,
        "scheduling": scheduling,
        **further,
    }
    return copy.deepcopy(spec)


def pool(trainers: int, gpus: int = 1, **further: Any) -> Json:
    """Return the spec of a pool of trainers."""
    trainer = {"replicas": trainers, "gpus": gpus, "resources": SMALL}
    return {"model": TINY, "trainer": trainer, **further}


def pool_url(lab: Lab, name: str) -> str:
    """Return the path of a pool."""
    return path(GROUP_VERSION, "trainerpools", lab.namespace, name)


TINIEST: Json = {"requests": {"cpu": "1m", "memory": "4Mi"}}
