"""The network of a real node: a bridge for pods, names and addresses of Services.

It lies in a network namespace of its own. What DNS and kube-proxy are in a cluster is here: names
come from dnsmasq, and a connection to a Service's address is passed on to one of its pods.
Network policies are not enforced.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.e2e.cluster import ApiClient, path
from tests.e2e.cluster.debian import run
from tests.e2e.cluster.processes import Process, send_signal
from tests.e2e.cluster.services import ServiceNetwork
from tests.node.programs import Programs

ADDRESS = "10.201.0.1"
"""Of the node, and of what listens for its pods."""
_BRIDGE = "pods"
_PODS, _FIRST_POD = "10.201.0.0/16", "10.201.1.0"
_START_TIMEOUT_S = 20.0
_SERVICES, _FIRST_SERVICE = "10.202.0.0/16", "10.202.0.1"


class NodeAddresses:
    """Where the control plane is for pods, and what it gives to Services."""

    server = ADDRESS
    services = _SERVICES
    first_service = _FIRST_SERVICE


def prepare_network() -> None:
    """Set up a network namespace that has nothing yet."""
    for command in (
        "link set lo up",
        f"link add {_BRIDGE} type bridge",
        f"address add {ADDRESS}/16 dev {_BRIDGE}",
        f"link set {_BRIDGE} up",
        # Servers look for the address of the default route, which leads nowhere here.
        f"route add default dev {_BRIDGE}",
        # Any of these addresses can be listened at.
        f"route add local {_SERVICES} dev lo",
    ):
        run(["ip", *command.split()], cwd=Path("/"))


def pod_network(folder: Path) -> dict[str, Any]:
    """Return the configuration of the CNI plugins; addresses in use are kept in the folder."""
    addresses = {
        "type": "host-local",
        "dataDir": str(folder),
        "ranges": [[{"subnet": _PODS, "rangeStart": _FIRST_POD}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    bridge = {"type": "bridge", "bridge": _BRIDGE, "isGateway": True, "ipam": addresses}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge]}


class NodeServices:
    """DNS and the addresses of Services, for as long as the context lasts.

    Args:
        api: Client of an administrator of the cluster.
        programs: Has dnsmasq.
        folder: For its files.
    """

    def __init__(self, api: ApiClient, programs: Programs, folder: Path) -> None:
        self._api = api
        self._programs = programs
        self._folder = folder
        self._dns: Process | None = None
        self._closing = contextlib.ExitStack()
        self._services = ServiceNetwork(
            api, (1, 20), network=_SERVICES, on_change=self._read_names_again
        )

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as closing:
            self._publish_server()
            self._services.start()
            closing.callback(self._services.stop)
            hosts = self._folder / "hosts"
            self._services.add_pod("node", "", ADDRESS, "node", hosts)
            command = [
                *("env", "dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null"),
                *("--no-hosts", "--no-resolv", f"--addn-hosts={hosts}", "--local=/#/"),
                *(f"--listen-address={ADDRESS}", "--bind-interfaces", "--user=root"),
            ]
            log = self._folder / "dnsmasq.log"
            dns = Process(command, log=log, env=self._programs.environment)
            closing.callback(dns.kill)
            _wait_for_dns(dns)
            # Only now: before it listens a signal would end it.
            self._dns = dns
            self._read_names_again()
            self._closing = closing.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._dns = None
        self._closing.close()

    def _read_names_again(self) -> None:
        if (dns := self._dns) is not None:
            send_signal(dns.pid, signal.SIGHUP)

    def _publish_server(self) -> None:
        """Say which address is behind the Service `kubernetes`, as API servers do themselves."""
        port = int(self._api.server.rpartition(":")[2])
        self._api.create(
            path("discovery.k8s.io/v1beta1", "endpointslices", "default"),
            {
                "metadata": {
                    "name": "kubernetes",
                    "labels": {"kubernetes.io/service-name": "kubernetes"},
                },
                "addressType": "IPv4",
                "ports": [{"name": "https", "port": port}],
                "endpoints": [{"addresses": [ADDRESS], "conditions": {"ready": True}}],
            },
        )


def _wait_for_dns(dns: Process) -> None:
    end_s = time.monotonic() + _START_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), socket.create_connection((ADDRESS, 53), 1):
            return
        if dns.poll() is not None or time.monotonic() > end_s:
            raise RuntimeError(f"dnsmasq did not start:\n{dns.tail()}")
        time.sleep(0.05)
