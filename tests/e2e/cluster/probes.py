"""Probes of containers: gRPC, HTTP, TCP and commands."""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import subprocess
import time
from concurrent.futures import Executor, Future

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.e2e.cluster.api import Json
from tests.e2e.cluster.container import Container


class Probe:
    """Repeats one probe of one running container and keeps its verdict.

    Args:
        spec: The probe of the container's specification.
        container: The specification, for the names of its ports.
        running: The container.
        address: The pod's.
        executor: Runs the attempts, so that a slow one holds up no other.
        initially: The verdict before there are enough attempts.
    """

    def __init__(
        self,
        spec: Json,
        container: Json,
        running: Container,
        address: str,
        executor: Executor,
        *,
        initially: bool,
    ) -> None:
        self.succeeded = initially
        self.message = ""
        self._spec = spec
        self._container = container
        self._running = running
        self._address = address
        self._executor = executor
        self._next_s = time.monotonic() + spec.get("initialDelaySeconds", 0)
        self._attempt: Future[str] | None = None
        self._num_equal = 0
        self._last = initially

    def step(self) -> None:
        """Look at the attempt that runs, or begin one that is due."""
        if self._attempt is not None:
            if self._attempt.done():
                self._count(self._attempt.result())
                self._attempt = None
        elif time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._spec.get("periodSeconds", 10)
            self._attempt = self._executor.submit(self._try)

    def _count(self, message: str) -> None:
        good = not message
        self._num_equal = self._num_equal + 1 if good == self._last else 1
        self._last = good
        key, default = ("successThreshold", 1) if good else ("failureThreshold", 3)
        if self._num_equal >= self._spec.get(key, default):
            self.succeeded, self.message = good, message

    def _try(self) -> str:
        """Return what is wrong, or nothing."""
        timeout_s = float(self._spec.get("timeoutSeconds", 1))
        try:
            if "exec" in self._spec:
                return self._try_command(timeout_s)
            if "httpGet" in self._spec:
                return self._try_http(self._spec["httpGet"], timeout_s)
            if "grpc" in self._spec:
                return self._try_grpc(self._spec["grpc"], timeout_s)
            port = self._port(self._spec["tcpSocket"]["port"])
            with socket.create_connection((self._address, port), timeout_s):
                return ""
        except (OSError, grpc.RpcError, http.client.HTTPException) as error:
            return f"{type(error).__name__}: {error}"
        except subprocess.TimeoutExpired:
            return f"the command took more than {timeout_s} s"

    def _try_command(self, timeout_s: float) -> str:
        done = self._running.execute(self._spec["exec"]["command"], timeout_s)
        return f"exit code {done.returncode}: {done.stderr}" if done.returncode else ""

    def _try_http(self, action: Json, timeout_s: float) -> str:
        address, port = action.get("host") or self._address, self._port(action["port"])
        connection: http.client.HTTPConnection
        if action.get("scheme") == "HTTPS":
            context = ssl.create_default_context()
            # As kubelets do.
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection = http.client.HTTPSConnection(
                address, port, timeout=timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(address, port, timeout=timeout_s)
        headers = {entry["name"]: entry["value"] for entry in action.get("httpHeaders", [])}
        with contextlib.closing(connection):
            connection.request("GET", action.get("path", "/"), headers=headers)
            status = connection.getresponse().status
        return "" if 200 <= status < 400 else f"HTTP status {status}"

    def _try_grpc(self, action: Json, timeout_s: float) -> str:
        with grpc.insecure_channel(f"{self._address}:{self._port(action['port'])}") as channel:
            request = health_pb2.HealthCheckRequest(service=action.get("service", ""))
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout_s)
        serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return "" if serving else f"status {answer.status}"

    def _port(self, port: int | str) -> int:
        if isinstance(port, int):
            return port
        ports = self._container.get("ports", [])
        named = {entry.get("name"): int(entry["containerPort"]) for entry in ports}
        if port not in named:
            raise OSError(f"the container has no port named {port}")
        return named[port]
