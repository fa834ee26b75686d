"""A newer server of custom resources behind the core server: the tier that evaluates CEL.

The core server is of a version that drops `x-kubernetes-validations` in silence. The core server
asks this one for the groups of its definitions, so one kubeconfig serves both. This one asks the
core server what a caller may do. `kubectl explain` does not see its schemas.
"""

from __future__ import annotations

import base64
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from urllib3.exceptions import HTTPError

from tests.e2e.cluster.api import ApiClient, ApiError, Json, path
from tests.e2e.cluster.control_plane import ControlPlane, write_kubeconfig
from tests.e2e.cluster.processes import Process
from tinsmith_local.process import free_port

_TIMEOUT_S = 60.0
_POLL_S = 0.05
_NAME = "crd-server"
_NAMESPACE = "kube-system"
_DEFINITIONS = path("apiextensions.k8s.io/v1", "customresourcedefinitions")
_API_SERVICES = path("apiregistration.k8s.io/v1", "apiservices")
# They watch kinds that the core server does not have yet.
_NO_ADMISSION = (
    "ValidatingAdmissionPolicy",
    "MutatingAdmissionPolicy",
    "ValidatingAdmissionWebhook",
    "MutatingAdmissionWebhook",
)


class CrdServer:
    """Serves what `install` defines, until the context ends.

    Args:
        binary: apiextensions-apiserver.
        plane: The control plane that it belongs to.
        core: Administrator's client of the core server.
        folder: Keys and logs.
    """

    def __init__(self, binary: Path, plane: ControlPlane, core: ApiClient, folder: Path) -> None:
        self.api: ApiClient
        """Client of this server itself, for its definitions."""
        self._plane = plane
        self._core = core
        self._binary = binary
        self._folder = folder
        self._port = free_port()
        self._services: set[str] = set()
        self._process: Process | None = None

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def install(self, definition: Json) -> None:
        """Create a CustomResourceDefinition; returns once the core server passes its kind on.

        Raises:
            ApiError: If the definition is refused, for instance because a rule does not compile.
        """
        self.api.create(_DEFINITIONS, definition)
        spec = definition["spec"]
        for version in spec["versions"]:
            if version["served"]:
                self._register(spec["group"], version["name"])
                self._wait_for_kind(f"{spec['group']}/{version['name']}", spec["names"]["plural"])

    def _start(self) -> None:
        authority, config = self._plane.authority, self._plane.kubeconfig
        # The core server looks for the name of the Service that leads here.
        serving = authority.issue(
            _NAME, dns_names=["localhost", f"{_NAME}.{_NAMESPACE}.svc"], addresses=["127.0.0.1"]
        )
        self._process = Process(
            [
                str(self._binary),
                f"--etcd-servers={self._plane.etcd}",
                "--etcd-prefix=/crd-server",
                "--bind-address=127.0.0.1",
                f"--secure-port={self._port}",
                f"--tls-cert-file={serving.certificate}",
                f"--tls-private-key-file={serving.key}",
                f"--client-ca-file={authority.certificate}",
                f"--kubeconfig={config}",
                f"--authentication-kubeconfig={config}",
                f"--authorization-kubeconfig={config}",
                "--enable-priority-and-fairness=false",
                f"--disable-admission-plugins={','.join(_NO_ADMISSION)}",
            ],
            log=self._folder / f"{_NAME}.log",
        )
        kubeconfig = self._folder / f"{_NAME}.kubeconfig"
        admin = authority.issue("crd-admin", organizations=["system:masters"])
        certificate = authority.certificate.read_bytes()
        write_kubeconfig(kubeconfig, f"https://127.0.0.1:{self._port}", certificate, admin)
        self.api = ApiClient(kubeconfig)
        self._wait_for("it is ready", lambda: self.api.text("/readyz") == "ok")
        spec = {"type": "ExternalName", "externalName": "localhost"}
        service = {"metadata": {"name": _NAME}, "spec": {**spec, "ports": [{"port": self._port}]}}
        self._core.create(path("v1", "services", _NAMESPACE), service)

    def _stop(self) -> None:
        for name in self._services:
            self._core.delete(f"{_API_SERVICES}/{name}")
        self._core.delete(path("v1", "services", _NAMESPACE, _NAME))
        if self._process is not None:
            self._process.kill()

    def _register(self, group: str, version: str) -> None:
        name = f"{version}.{group}"
        if name in self._services:
            return
        self._services.add(name)
        spec = {
            "group": group,
            "version": version,
            "groupPriorityMinimum": 1000,
            "versionPriority": 10,
            "service": {"namespace": _NAMESPACE, "name": _NAME, "port": self._port},
            "caBundle": base64.b64encode(self._plane.authority.certificate.read_bytes()).decode(),
        }
        self._core.create(_API_SERVICES, {"metadata": {"name": name}, "spec": spec})

    def _wait_for_kind(self, group_version: str, plural: str) -> None:
        def is_listed() -> bool:
            self._core.list(path(group_version, plural))
            return True

        self._wait_for(f"the core server passes {plural} on", is_listed)

    def _wait_for(self, what: str, is_true: Callable[[], bool]) -> None:
        assert self._process is not None
        end_s = time.monotonic() + _TIMEOUT_S
        while True:
            with contextlib.suppress(ApiError, OSError, HTTPError):
                if is_true():
                    return
            if self._process.poll() is not None or time.monotonic() > end_s:
                raise RuntimeError(f"not so that {what}:\n{self._process.tail()}")
            time.sleep(_POLL_S)
