"""A bad network between one client and the API server that knows requests: it can lose one answer.

The proxy speaks plain HTTP to its client and TLS, with the client's certificate, to the server.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from urllib.parse import urlsplit

import yaml

from tests.e2e.cluster import TestCluster
from tests.e2e.cluster.api import ssl_context_of
from tests.faults.proxy import Fault, HttpFaultProxy, Request, reset


class ApiProxy(HttpFaultProxy):
    """Forwards the requests of one client to the API server of a cluster.

    Args:
        cluster: The cluster.
    """

    def __init__(self, cluster: TestCluster) -> None:
        server = urlsplit(cluster.api.server)
        self._context = ssl_context_of(cluster.kubeconfig)
        self._name = str(server.hostname)
        self._watches: set[socket.socket] = set()
        self._watch_lock = threading.Lock()
        self._cutting: list[Fault] = []
        self._serving = threading.local()
        super().__init__(self._name, int(server.port or 443))

    def cut_watches_at(self, fault: Fault) -> None:
        """Have a fault strike, with all watches cut just before its request goes on."""
        self._cutting.append(fault)
        self.add(fault)

    def kubeconfig(self, original: Path, target: Path) -> Path:
        """Write a kubeconfig whose server is this proxy, which has the certificate itself."""
        config = yaml.safe_load(original.read_text())
        for entry in config["clusters"]:
            entry["cluster"] = {"server": self.endpoint}
        for entry in config["users"]:
            entry["user"] = {}
        target.write_text(yaml.safe_dump(config))
        return target

    def serve(self, client: socket.socket) -> None:
        self._serving.client = client
        try:
            super().serve(client)
        finally:
            with self._watch_lock:
                self._watches.discard(client)

    def next_fault(self, request: Request | None) -> tuple[Fault, threading.Event]:
        if request is not None and "watch=" in request.target:
            with self._watch_lock:
                self._watches.add(self._serving.client)
        fault, dropped = super().next_fault(request)
        if any(fault is each for each in self._cutting):
            with self._watch_lock:
                watches = list(self._watches)
            for watch in watches:
                reset(watch)
        return fault, dropped

    def connect_to_server(self) -> socket.socket:
        return self._context.wrap_socket(super().connect_to_server(), server_hostname=self._name)
