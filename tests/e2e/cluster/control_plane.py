"""A control plane of real servers: etcd, kube-apiserver, controller-manager and scheduler.

Two things differ from a cluster: no controller decides that a node is lost (tests do), and pods run
on loopback addresses (see `kubelet`).
"""

from __future__ import annotations

import base64
import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml
from urllib3.exceptions import HTTPError

from tests.e2e.cluster.api import ApiClient, ApiError
from tests.e2e.cluster.binaries import Binaries
from tests.e2e.cluster.loopback import Addresses
from tests.e2e.cluster.pki import Authority, KeyPair, make_signing_key
from tests.e2e.cluster.processes import Process
from tinsmith_local.process import free_port

START_TIMEOUT_S = 90.0
_POLL_S = 0.05
# Tests set the conditions of nodes themselves, and fake nodes send no heartbeats. Endpoints may not
# hold loopback addresses, EndpointSlices may: the controller of the former would fail on every pod.
_NO_CONTROLLERS = ("nodelifecycle", "nodeipam", "endpoint", "attachdetach", "ttl")
_FAST = ("--kube-api-qps=300", "--kube-api-burst=600")


class ControlPlane:
    """Four servers of this machine and a kubeconfig of an administrator.

    Args:
        binaries: The programs.
        folder: Keys, data and logs.
        addresses: Where the API server listens, and what Services get.
    """

    def __init__(self, binaries: Binaries, folder: Path, addresses: Addresses) -> None:
        self.folder = folder
        self.kubeconfig = folder / "admin.kubeconfig"
        self.processes: dict[str, Process] = {}
        self._binaries = binaries
        self._addresses = addresses
        folder.mkdir(parents=True, exist_ok=True)
        self.authority = Authority(folder, "ca")
        self._port = free_port(addresses.server)
        self.etcd = f"http://127.0.0.1:{free_port()}"

    @property
    def server(self) -> str:
        """Address of the API server."""
        return f"https://{self._addresses.server}:{self._port}"

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End every server at once: their data is not read again."""
        for process in reversed(self.processes.values()):
            process.kill()

    def logs(self) -> str:
        """Return the end of what every server wrote."""
        return "\n".join(f"== {name}\n{p.tail()}" for name, p in self.processes.items())

    def _start(self) -> None:
        admin = self.authority.issue("admin", organizations=["system:masters"])
        write_kubeconfig(
            self.kubeconfig, self.server, self.authority.certificate.read_bytes(), admin
        )
        self._start_etcd()
        signing_key = make_signing_key(self.folder / "service-accounts.key")
        self._start_apiserver(signing_key)
        self._wait_for_apiserver()
        self._run(
            "controller-manager",
            str(self._binaries.controller_manager),
            f"--kubeconfig={self.kubeconfig}",
            f"--controllers={','.join(['*', *(f'-{name}' for name in _NO_CONTROLLERS)])}",
            f"--service-account-private-key-file={signing_key}",
            f"--root-ca-file={self.authority.certificate}",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
            "--concurrent-namespace-syncs=20",
            *_FAST,
        )
        self._run(
            "scheduler",
            str(self._binaries.scheduler),
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
            "--port=0",
            "--secure-port=0",
            *_FAST,
        )
        self._wait_for_service_accounts()

    def _start_etcd(self) -> None:
        peer = f"http://127.0.0.1:{free_port()}"
        self._run(
            "etcd",
            str(self._binaries.etcd),
            f"--data-dir={self.folder / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={self.etcd}",
            f"--advertise-client-urls={self.etcd}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--log-level=warn",
        )

    def _start_apiserver(self, signing_key: Path) -> None:
        folder, ca = self.folder, self.authority.certificate
        serving = self.authority.issue(
            "kube-apiserver",
            dns_names=["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"],
            addresses=[self._addresses.server, self._addresses.first_service],
        )
        kubelet = self.authority.issue("apiserver-of-kubelets", organizations=["system:masters"])
        front = Authority(folder, "front-proxy-ca")
        aggregator = front.issue("front-proxy-client")
        self._run(
            "apiserver",
            str(self._binaries.apiserver),
            f"--etcd-servers={self.etcd}",
            f"--bind-address={self._addresses.server}",
            f"--secure-port={self._port}",
            f"--tls-cert-file={serving.certificate}",
            f"--tls-private-key-file={serving.key}",
            f"--client-ca-file={ca}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-signing-key-file={signing_key}",
            f"--service-account-key-file={signing_key}",
            # Pods get tokens by TokenRequest, as in every cluster since 1.21.
            "--feature-gates=BoundServiceAccountTokenVolume=true",
            f"--service-cluster-ip-range={self._addresses.services}",
            # Endpoints may not hold the loopback address of this server.
            "--endpoint-reconciler-type=none",
            "--allow-privileged=true",
            # Only the controller that is switched off would take its taint away again.
            "--disable-admission-plugins=TaintNodesByCondition",
            f"--kubelet-client-certificate={kubelet.certificate}",
            f"--kubelet-client-key={kubelet.key}",
            f"--kubelet-certificate-authority={ca}",
            "--kubelet-preferred-address-types=InternalIP",
            f"--requestheader-client-ca-file={front.certificate}",
            "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-username-headers=X-Remote-User",
            f"--proxy-client-cert-file={aggregator.certificate}",
            f"--proxy-client-key-file={aggregator.key}",
        )

    def _run(self, name: str, *argv: str) -> None:
        self.processes[name] = Process(argv, log=self.folder / f"{name}.log")

    def _wait_for_apiserver(self) -> None:
        api = ApiClient(self.kubeconfig)

        def is_ready() -> bool:
            with socket.create_connection((self._addresses.server, self._port), 1):
                pass  # refused until it listens, without a retry and its warnings
            # Its post-start hooks create the roles and priority classes that everything needs.
            return api.text("/readyz") == "ok"

        self._wait_for("the API server", is_ready)
        api.close()

    def _wait_for_service_accounts(self) -> None:
        api = ApiClient(self.kubeconfig)
        url = "/api/v1/namespaces/default/serviceaccounts/default"
        self._wait_for("the controller manager", lambda: api.find(url) is not None)
        api.close()

    def _wait_for(self, what: str, is_ready: Callable[[], bool]) -> None:
        end_s = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(ApiError, OSError, HTTPError):
                if is_ready():
                    return
            ended = [name for name, process in self.processes.items() if process.poll() is not None]
            if ended or time.monotonic() > end_s:
                raise RuntimeError(f"{what} did not start ({ended} ended):\n{self.logs()}")
            time.sleep(_POLL_S)


def write_kubeconfig(target: Path, server: str, authority: bytes, pair: KeyPair) -> None:
    """Write a kubeconfig of a client certificate, with everything inline."""
    user = {
        "client-certificate-data": _base64(pair.certificate.read_bytes()),
        "client-key-data": _base64(pair.key.read_bytes()),
    }
    cluster = {"server": server, "certificate-authority-data": _base64(authority)}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
    }
    target.write_text(yaml.safe_dump(config))
    target.chmod(0o600)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
