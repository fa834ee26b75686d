"""The test cluster as tests see it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.e2e.cluster import binaries
from tests.e2e.cluster.api import ApiClient, ApiError, Json, path
from tests.e2e.cluster.control_plane import ControlPlane
from tests.e2e.cluster.crd_server import CrdServer
from tests.e2e.cluster.instant import Ending, Outcome
from tests.e2e.cluster.kubelet import Kubelet
from tests.e2e.cluster.loopback import AddressBlock
from tests.e2e.cluster.nodes import FakeNode
from tests.e2e.cluster.runner import Image

_EXISTING = "TINSMITH_TEST_KUBECONFIG"
_KUBECTL_TIMEOUT_S = 60
_POLL_S = 0.05


class TestCluster:
    """A Kubernetes API for tests: one of our own, or the one of a kubeconfig.

    Attributes:
        kubeconfig: File of an administrator.
        api: Client of an administrator.
        folder: Everything that is written: keys, data, logs, the files of pods.
        addresses: Of pods that are processes; None if it has no such pods.
        authority: Vouches for its servers; None if the cluster is not ours.
    """

    __test__ = False  # pytest takes classes of this name for tests

    def __init__(
        self,
        kubeconfig: Path,
        folder: Path,
        addresses: AddressBlock | None = None,
        plane: ControlPlane | None = None,
    ) -> None:
        self.kubeconfig = kubeconfig
        self.authority = plane.authority if plane else None
        self._plane = plane
        self.folder = folder
        self.addresses = addresses
        self.api = ApiClient(kubeconfig)
        self._definition_apis = [self.api]
        self._numbers = itertools.count(1)
        self._kubectl = binaries.find_kubectl()
        version = self.api.get("/version")
        digits = "".join(c for c in version["minor"] if c.isdigit())
        self.version: tuple[int, int] = (int(version["major"]), int(digits))

    def kubectl(self, *args: str, stdin: str | None = None, kubeconfig: Path | None = None) -> str:
        """Run kubectl and return its standard output.

        Raises:
            RuntimeError: If it fails; with what it wrote to standard error.
        """
        done = subprocess.run(
            [self._kubectl, f"--kubeconfig={kubeconfig or self.kubeconfig}", *args],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=_KUBECTL_TIMEOUT_S,
            check=False,
            # Discovery is cached under HOME by address, and the next cluster may have the same.
            env={"PATH": os.environ["PATH"], "HOME": str(self.folder)},
        )
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(args)}: {done.stderr.strip()}")
        return done.stdout

    def kubectl_json(self, *args: str) -> Any:
        """Run kubectl with `-o json` and return the objects."""
        return json.loads(self.kubectl(*args, "-o", "json"))

    def apply(self, *manifests: Json, namespace: str = "default") -> None:
        """Apply objects as `kubectl apply` does."""
        self.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump_all(manifests))

    @contextlib.contextmanager
    def namespace(self, labels: Mapping[str, str] | None = None) -> Iterator[str]:
        """Yield the name of a fresh namespace; what is in it is deleted afterwards.

        The end does not wait for the namespace to vanish: names are never used again.
        """
        name = f"test-{os.getpid()}-{next(self._numbers)}"
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name, "labels": labels or {}}})
        self.wait_for(
            lambda: self.api.find(path("v1", "serviceaccounts", name, "default")),
            "the namespace's service account",
        )
        try:
            yield name
        finally:
            self.api.delete(f"/api/v1/namespaces/{name}")
            self._strip_finalizers(name)

    def service_account_kubeconfig(self, namespace: str, name: str) -> Path:
        """Return a kubeconfig of a service account, with a token by TokenRequest."""
        url = path("v1", "serviceaccounts", namespace, name, "token")
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
        token = self.api.create(url, {**body, "spec": {"expirationSeconds": 3600}})
        config = yaml.safe_load(self.kubeconfig.read_text())
        config["users"] = [{"name": name, "user": {"token": token["status"]["token"]}}]
        for entry in config["contexts"]:
            entry["context"]["user"] = name
        target = self.folder / f"{namespace}-{name}.kubeconfig"
        target.write_text(yaml.safe_dump(config))
        target.chmod(0o600)
        return target

    def wait_for_phase(
        self, namespace: str, name: str, phase: str, timeout_s: float = 30.0
    ) -> Json:
        """Return a pod once it is in a phase.

        Raises:
            TimeoutError: If it does not come to that; with the pod's last status.
        """
        url = path("v1", "pods", namespace, name)
        end_s = time.monotonic() + timeout_s
        while (pod := self.api.get(url))["status"].get("phase") != phase:
            if time.monotonic() > end_s:
                raise TimeoutError(f"pod {name} is not {phase}: {json.dumps(pod['status'])}")
            time.sleep(_POLL_S)
        return pod

    def new_folder(self, name: str) -> Path:
        """Return a new, empty folder."""
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir(parents=True)
        return folder

    def kubelet(
        self,
        nodes: Sequence[FakeNode] = (),
        *,
        images: Mapping[str, Sequence[str] | Image] | None = None,
        instant: bool | Outcome = False,
        ending: Ending = lambda _: 0.0,
        backoff_s: float = 0.5,
    ) -> Kubelet:
        """Return a kubelet for fake nodes, to be used as a context; see `Kubelet`."""
        return Kubelet(
            self, nodes, images=images, instant=instant, ending=ending, backoff_s=backoff_s
        )

    @contextlib.contextmanager
    def crd_server(self) -> Iterator[CrdServer]:
        """Yield a server behind this one whose custom resources have CEL rules.

        Raises:
            UnavailableError: If there is none and it cannot be built here.
        """
        if self._plane is None:
            raise binaries.UnavailableError("a cluster of others evaluates CEL itself, or never")
        binary = binaries.find_crd_server()
        folder = self.new_folder("crd-server")
        with CrdServer(binary, self._plane, self.api, folder) as server:
            self._definition_apis.append(server.api)
            try:
                yield server
            finally:
                self._definition_apis.remove(server.api)

    def wait_for(
        self, condition: Callable[[], object], what: str = "the condition", timeout_s: float = 30.0
    ) -> Any:
        """Return the first true value of a condition.

        Raises:
            TimeoutError: If it stays false.
        """
        end_s = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > end_s:
                raise TimeoutError(f"in vain for {timeout_s:.0f} s: {what}")
            time.sleep(_POLL_S)
        return value

    def _strip_finalizers(self, namespace: str) -> None:
        """Take the finalizers off custom objects, whose controllers have ended with their test."""
        url = path("apiextensions.k8s.io/v1", "customresourcedefinitions")
        for crd in [crd for api in self._definition_apis for crd in api.list(url)]:
            spec = crd["spec"]
            if spec["scope"] != "Namespaced":
                continue
            version = next(entry["name"] for entry in spec["versions"] if entry["storage"])
            group_version, plural = f"{spec['group']}/{version}", spec["names"]["plural"]
            with contextlib.suppress(ApiError):  # a definition that is going serves no objects
                for item in self.api.list(path(group_version, plural, namespace)):
                    if item["metadata"].get("finalizers"):
                        url = path(group_version, plural, namespace, item["metadata"]["name"])
                        self.api.patch(url, {"metadata": {"finalizers": None}})


def prepare(*, with_crd_server: bool = False) -> None:
    """Build what `start_cluster`, and its CRD server where asked for, need and this machine lacks.

    Raises:
        UnavailableError: If it cannot be had here.
    """
    binaries.find_kubectl()
    if not os.environ.get(_EXISTING):
        binaries.find_control_plane()
        if with_crd_server:
            binaries.find_crd_server()


@contextlib.contextmanager
def start_cluster(folder: Path) -> Iterator[TestCluster]:
    """Yield a cluster: that of `$TINSMITH_TEST_KUBECONFIG`, else one that ends with the context.

    Its nodes and pods are those of `TestCluster.kubelet`.

    Raises:
        UnavailableError: If there is none and none can be made.
    """
    with contextlib.closing(AddressBlock()) as addresses:
        if existing := os.environ.get(_EXISTING):
            yield TestCluster(Path(existing), folder, addresses)
            return
        found = binaries.find_control_plane()
        with ControlPlane(found, folder / "control-plane", addresses) as plane:
            yield TestCluster(plane.kubeconfig, folder, addresses, plane)
