"""Each method and route, sent its largest bodies in hostile forms: others do not wait for them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tests.fakes.hostile_bodies import documents, messages
from tests.integration.test_authorization_matrix import METHODS
from tests.support.memory import peak_mib, resident_mib
from tests.support.server_waits import own_times, slowness, times_of, waited_s

import tinsmith
from tinsmith_gateway.access.permissions import HTTP_PERMISSIONS
from tinsmith_local.process import ServerProcess
from tinsmith_runtime.rpc.permissions import KeyRole, may_call

NATIVE_BYTES, HTTP_BYTES = 60 * 2**20, 4 * 2**20
MAX_WAIT_S = 1.0
"""What a server may let others wait, on the machine of `server_waits.STEPS_OF_SECOND`; what other
programs take of the processors is not counted."""
MAX_TIMES, OTHER_MIB = 8, 128
"""Memory may grow by so many times the body; what is kept for the next one counts as well."""
FIELDS = [
    "prompt",
    "messages",
    "input",
    "tools",
    "model",
    "stop",
    "reward",
    "data",
    "text",
    "tokens",
]
TIMEOUT_S = 120.0
MAX_RESIDENT_MIB = 6144


@dataclass
class Others:
    """Asks, again and again, what another project and a load balancer ask."""

    address: str
    key: str
    pid: int
    worst_s: float = 0.0
    failures: list[str] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def ask_by_http(self) -> None:
        with httpx.Client(base_url=f"http://{self.address}", timeout=TIMEOUT_S) as client:
            self._ask(lambda: client.get("/healthz").raise_for_status())

    def ask_natively(self) -> None:
        with grpc.insecure_channel(self.address) as channel:
            method = channel.unary_unary("/tinsmith.v1.SchedulerService/ListTrainingRuns")
            metadata = [("authorization", f"Bearer {self.key}")]
            request = b"\x0a\x0fprojects/victim"
            self._ask(lambda: method(request, metadata=metadata, timeout=TIMEOUT_S))

    def _ask(self, call: Any) -> None:
        while not self.ended.wait(0.03):
            before, own, begin_s = times_of(self.pid), own_times(), time.perf_counter()
            try:
                call()
            except (grpc.RpcError, httpx.HTTPError) as error:
                self.failures.append(repr(error)[:200])
            wall_s = time.perf_counter() - begin_s
            found_s = waited_s(wall_s, times_of(self.pid), before, own_times().since(own))
            self.worst_s = max(self.worst_s, found_s)

    def guard(self, pid: int) -> None:
        """End the server before it takes the memory of the machine."""
        while not self.ended.wait(0.1):
            if resident_mib(pid) > MAX_RESIDENT_MIB:
                self.failures.append(f"the server has more than {MAX_RESIDENT_MIB} MiB")
                os.kill(pid, signal.SIGKILL)
                return


@dataclass
class Target:
    """A server as a user starts it."""

    address: str
    pid: int
    evil: str
    victim: str
    names: dict[str, str]
    rows: list[tuple[float, float, str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def watched(self, what: str, form: str, size: int) -> Iterator[None]:
        """Hold what others waited, and how the memory grew, against the bounds."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        before = resident_mib(self.pid)
        others = Others(self.address, self.victim, self.pid)
        threads = [
            threading.Thread(target=others.ask_by_http),
            threading.Thread(target=others.ask_natively),
            threading.Thread(target=others.guard, args=[self.pid]),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            others.ended.set()
            for thread in threads:
                thread.join()
        grown = peak_mib(self.pid) - before
        self.rows.append((others.worst_s, grown * 2**20 / size, what, form))
        self.problems += [f"{form}: {failure}" for failure in others.failures]
        if others.worst_s > MAX_WAIT_S and others.worst_s > MAX_WAIT_S * slowness():
            self.problems.append(f"{form}: others waited {others.worst_s:.1f} s")
        if grown * 2**20 > MAX_TIMES * size + OTHER_MIB * 2**20:
            self.problems.append(f"{form}: {grown:.0f} MiB more for {size / 2**20:.0f}")

    def check(self) -> None:
        """Fail for what was seen since the last time."""
        found, self.problems = self.problems, []
        assert not found


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    with ServerProcess(tmp_path_factory.mktemp("hostile"), {}) as server:
        with tinsmith.Client(server.address, server.api_key) as client:
            keys = {
                project: client.keys.create(project=project, role="member").secret
                for project in ("evil", "victim")
            }
        with tinsmith.Client(server.address, keys["evil"]) as client:
            run = client.create_lora_training_run(base_model="tiny", rank=1)
            sampler = client.create_sampling_client(base_model="tiny")
            names = {"run": run.name, "sampling_session": sampler.name, "parent": "projects/evil"}
        found = Target(server.address, server.pid, keys["evil"], keys["victim"], names)
        yield found
    sys.stdout.write("\nworst waits, and memory as times the body:\n")
    for wait_s, times, what, form in sorted(found.rows, reverse=True)[:20]:
        sys.stdout.write(f"{wait_s:6.2f} s {times:6.1f} x  {what}  {form}\n")
    for wait_s, times, what, form in sorted(found.rows, key=lambda row: -row[1])[:10]:
        sys.stdout.write(f"{wait_s:6.2f} s {times:6.1f} x  {what}  {form}\n")


@pytest.mark.parametrize(
    "method", sorted(method for method in METHODS if may_call(KeyRole.MEMBER, method))
)
def test_no_body_of_a_method_stops_others(target: Target, method: str) -> None:
    descriptor = METHODS[method]
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    metadata = [("authorization", f"Bearer {target.evil}")]
    with grpc.insecure_channel(target.address, options=options) as channel:
        for form, body in messages(descriptor.input_type, target.names, NATIVE_BYTES):
            with target.watched(method, form, len(body)), contextlib.suppress(grpc.RpcError):
                calls: Any = channel.stream_stream(method)(
                    iter([body]), metadata=metadata, timeout=TIMEOUT_S
                )
                # Of an answer that goes on the first is enough.
                next(calls, None)
                calls.cancel()
    target.check()


@pytest.mark.parametrize(
    ("method", "path"),
    sorted(
        entry
        for entry, access in HTTP_PERMISSIONS.items()
        if entry[0] in ("POST", "PUT") and KeyRole.MEMBER in access
    ),
)
def test_no_body_of_a_route_stops_others(target: Target, method: str, path: str) -> None:
    url = path.replace("{", "").replace("}", "").replace(":path", "")
    headers = {"x-api-key": target.evil, "content-type": "application/json"}
    with httpx.Client(base_url=f"http://{target.address}", timeout=TIMEOUT_S) as client:
        for form, body in documents(FIELDS, HTTP_BYTES):
            with target.watched(path, form, len(body)), contextlib.suppress(httpx.HTTPError):
                client.request(method, url, content=body, headers=headers)
    target.check()
