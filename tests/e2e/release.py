"""A release of the chart on a test cluster."""

from __future__ import annotations

import base64
import contextlib
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import helm_python

from tests.e2e.cluster import Json, TestCluster, path
from tests.fakes.chart_harness import CHART, ROOT, merge
from tinsmith_local.certificates import make_certificates
from tinsmith_runtime.rpc.pod_tls import PodTls

CEL_VERSION = (1, 25)
"""Helm applies definitions on the server, and before this version servers refuse rules in CEL."""
DEPLOYMENTS = ("scheduler", "gateway", "coordinator", "environment", "checkpoints")
"""Beside the controller."""
_ROLLOUT_TIMEOUT_S = 240.0
"""Six programs start beside each other; a busy machine takes minutes."""


@dataclass(frozen=True)
class Release:
    """A release of the chart, in a namespace and with a namespace of jobs of its own."""

    cluster: TestCluster
    config: helm_python.Config
    namespace: str
    certificates: Path
    name: str = "tinsmith"

    @property
    def jobs_namespace(self) -> str:
        return f"{self.namespace}-jobs"

    def values(self, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Return values with the namespace of jobs."""
        entry = {"name": self.jobs_namespace, "project": "default", "create": True}
        # No cert-manager is here.
        tls = {"certManager": False}
        return merge({"jobs": {"namespaces": [entry]}, "tls": tls}, changes)

    def install(self, changes: Mapping[str, Any]) -> None:
        """Do what `helm install` does, on older servers with `--skip-crds` as README.md says.

        With certificates of pods, as docs/tls.md makes them.
        """
        self._make_certificates(self.namespace)
        self._install(changes)
        self._make_certificates(self.jobs_namespace)

    def _make_certificates(self, namespace: str) -> None:
        """Make the Secrets with the certificates of the pods in a namespace."""
        for issued in make_certificates(self.certificates, namespace=namespace):
            name = f"{self.name}-pods-{issued.role}"
            self.cluster.api.delete(path("v1", "secrets", namespace, name))
            self.cluster.kubectl(
                *("create", "secret", "generic", name, "-n", namespace),
                f"--from-file={issued.folder}",
            )

    def open_channel(self, address: str, role: str) -> grpc.Channel:
        """Return a channel to a pod, with the certificate of a gateway."""
        folder = self.certificates / "gateway"
        tls = PodTls(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
        return tls.open_blocking_channel(address, role)

    def _install(self, changes: Mapping[str, Any]) -> None:
        if self.cluster.version >= CEL_VERSION:
            chart = str(CHART)
            self.config.install(chart, self.name, self.values(changes), namespace=self.namespace)
            return
        self.cluster.kubectl("apply", "--validate=false", "-f", str(ROOT / "k8s/crd"))
        options = {"namespace": self.namespace, "skip_crds": True}
        # The binding's `install` has no parameter for that option of the library.
        helm_python._native.call_string(
            "helm_install",
            self.config._raw(),
            self.config._context_arg(None),
            *self.config._chart_args(str(CHART)),
            self.name,
            json.dumps(self.values(changes)),
            json.dumps(options),
        )

    def upgrade(self, changes: Mapping[str, Any]) -> None:
        self.config.upgrade(str(CHART), self.name, self.values(changes), namespace=self.namespace)

    def secret(self, name: str, *, of_jobs: bool = False) -> dict[str, str]:
        """Return a Secret of the release."""
        namespace = self.jobs_namespace if of_jobs else self.namespace
        data = self.cluster.api.get(path("v1", "secrets", namespace, name))["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def find(self, api_version: str, plural: str, name: str) -> Json | None:
        return self.cluster.api.find(path(api_version, plural, self.namespace, name))

    def wait_for_rollout(self, pod: str) -> None:
        """Wait until all pods of a Deployment are new and ready, as `kubectl rollout status`."""

        def is_done() -> bool:
            found = self.find("apps/v1", "deployments", f"{self.name}-{pod}")
            assert found is not None
            status, wanted = found["status"], found["spec"]["replicas"]
            counts = {
                status.get(key) for key in ("replicas", "updatedReplicas", "availableReplicas")
            }
            is_seen = status.get("observedGeneration") == found["metadata"]["generation"]
            return is_seen and counts == {wanted}

        self.cluster.wait_for(is_done, f"the rollout of {pod}", timeout_s=_ROLLOUT_TIMEOUT_S)


@contextlib.contextmanager
def new_release(cluster: TestCluster) -> Iterator[Release]:
    """Yield a release that is not installed yet, and is uninstalled in the end."""
    with (
        cluster.namespace() as namespace,
        tempfile.TemporaryDirectory() as folder,
        helm_python.Config(kubeconfig_path=cluster.kubeconfig, namespace=namespace) as config,
    ):
        release = Release(cluster, config, namespace, Path(folder))
        try:
            yield release
        finally:
            config.uninstall(release.name, ignore_not_found=True)
            if cluster.api.find(f"/api/v1/namespaces/{release.jobs_namespace}"):
                cluster.api.delete(f"/api/v1/namespaces/{release.jobs_namespace}")
