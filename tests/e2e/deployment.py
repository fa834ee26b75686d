"""A deployment for end-to-end tests: pods of Tinsmith as processes, beside a cluster."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Json, TestCluster, path
from tests.support.pod_keys import POD_KEY
from tests.support.pods import PodProcess
from tinsmith_local.process import free_port

GROUP_VERSION = "tinsmith.dev/v1alpha1"
ENDED = ("Succeeded", "Failed", "Cancelled")
_CRDS = Path(__file__).parents[2] / "k8s" / "crd"


class DrainedPod(PodProcess):
    """A pod that has to end by itself when it is asked to."""

    def stop(self, *, is_asked: bool = False) -> bool:
        """Ask the process to end, and wait; an error if it had to be killed."""
        has_ended = super().stop(is_asked=is_asked)
        assert has_ended, f"{self.name} did not end"
        return has_ended


def install_resources(cluster: TestCluster) -> None:
    """Install the definitions of our resources, and wait until they are served."""
    # Servers before 1.25 do not know rules in CEL, and drop them.
    cluster.kubectl("apply", "--validate=false", "-f", str(_CRDS))
    definitions = path("apiextensions.k8s.io/v1", "customresourcedefinitions")
    for plural in ("trainingjobs", "trainerpools"):

        def is_served(url: str = f"{definitions}/{plural}.tinsmith.dev") -> bool:
            return any(
                entry["type"] == "Established" and entry["status"] == "True"
                for entry in cluster.api.get(url).get("status", {}).get("conditions") or []
            )

        cluster.wait_for(is_served, f"{plural} to be served")


def scheduler_process(folder: Path, **settings: object) -> DrainedPod:
    """Return a scheduler on a port of its own."""
    return DrainedPod(
        "scheduler",
        folder,
        {
            "data_dir": folder / "scheduler",
            "listen_address": f"127.0.0.1:{free_port()}",
            "pod_key": POD_KEY,
            **settings,
        },
    )


def controller_process(
    cluster: TestCluster,
    folder: Path,
    namespace: str,
    scheduler_address: str,
    *,
    identity: str = "controller-0",
    **settings: object,
) -> DrainedPod:
    """Return a controller of one namespace."""
    return DrainedPod(
        identity,
        folder,
        {
            "namespaces": namespace,
            "kubeconfig": cluster.kubeconfig,
            "scheduler_address": scheduler_address,
            "gateway_address": scheduler_address,
            "pod_key": POD_KEY,
            "storage_uri": f"file://{folder / 'store'}",
            "image_repository": "tinsmith",
            "image_tag": "test",
            "device": "cpu",
            "lease_namespace": namespace,
            "identity": identity,
            "lease_ttl_s": 3,
            "report_interval_s": 0.5,
            "backoff_base_s": 0.5,
            "node_lost_s": 0,
            "resync_interval_s": 5,
            **settings,
        },
    )


class Jobs:
    """The jobs and pools of a namespace, as a person with kubectl sees them."""

    def __init__(self, cluster: TestCluster, namespace: str) -> None:
        self._cluster = cluster
        self.namespace = namespace

    def url(self, name: str = "", subresource: str = "", *, plural: str = "trainingjobs") -> str:
        """Return the path of the jobs, or of one."""
        return path(GROUP_VERSION, plural, self.namespace, *filter(None, (name, subresource)))

    def create(self, name: str, spec: Json, *, kind: str = "TrainingJob") -> Json:
        """Create a job or pool."""
        plural = f"{kind.lower()}s"
        manifest = {"apiVersion": GROUP_VERSION, "kind": kind, "metadata": {"name": name}}
        return self._cluster.api.create(self.url(plural=plural), {**manifest, "spec": spec})

    def get(self, name: str, *, plural: str = "trainingjobs") -> Json:
        """Return a job."""
        return self._cluster.api.get(self.url(name, plural=plural))

    def status(self, name: str, *, plural: str = "trainingjobs") -> Json:
        """Return the status of a job; empty if it has none."""
        found: Json = self.get(name, plural=plural).get("status", {})
        return found

    def all(self) -> list[Json]:
        """Return all jobs."""
        return list(self._cluster.api.list(self.url()))

    def patch(self, name: str, spec: Json, *, plural: str = "trainingjobs") -> Json:
        """Change fields of a spec."""
        return self._cluster.api.patch(self.url(name, plural=plural), {"spec": spec})

    def pods(self, name: str = "") -> list[Json]:
        """Return the pods of a job, or of all."""
        selector = f"tinsmith.dev/workload={name}" if name else "tinsmith.dev/workload"
        url = path("v1", "pods", self.namespace)
        return list(self._cluster.api.list(url, labelSelector=selector))

    def wait_phase(
        self, name: str, *phases: str, timeout_s: float = 30.0, plural: str = "trainingjobs"
    ) -> Json:
        """Return the status of a job once it is in one of some phases.

        Raises:
            TimeoutError: If it does not come to that; with the last status.
        """
        end_s = time.monotonic() + timeout_s
        while True:
            status = self.status(name, plural=plural)
            if status.get("phase") in phases:
                return status
            if time.monotonic() > end_s or (
                status.get("phase") in ENDED and "Failed" not in phases
            ):
                raise TimeoutError(f"{name} is not {' or '.join(phases)}: {status}")
            time.sleep(0.05)

    def wait_step(self, name: str, step: int, timeout_s: float) -> None:
        """Return once a job reported a step.

        Raises:
            TimeoutError: If it does not come to that; with the last status.
        """
        end_s = time.monotonic() + timeout_s
        while (status := self.status(name)).get("progress", {}).get("step", 0) < step:
            if time.monotonic() > end_s or status.get("phase") in ENDED:
                raise TimeoutError(f"{name} does not come to step {step}: {status}")
            time.sleep(0.05)


def gang(num_pods: int, gpus: int, **further: Any) -> Json:
    """Return the spec of a job with samplers of some GPUs and no driver: it holds nodes."""
    return {
        "method": {"type": "serve"},
        "model": {"name": "tiny", "source": "file:///models/tiny"},
        # The embedded engine samples on one device, and a job that gives it more is refused.
        "roles": {
            "sampler": {
                "replicas": num_pods,
                "gpus": gpus,
                "engine": "vllm" if gpus > 1 else "embedded",
                "resources": SMALL,
            }
        },
        **further,
    }


SMALL: Json = {"requests": {"cpu": "100m", "memory": "64Mi"}}
