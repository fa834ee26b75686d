"""Connections are cut in the middle of requests and of answers, between all pods and clients.

The database is reached through one proxy. All calls of clients and pods go through another one, an
HTTP tunnel, which gRPC is told of by the environment.
"""

from __future__ import annotations

import collections
import contextlib
import os
import random
import socket
import time
from collections.abc import Iterator

from tests.chaos.cluster import Cluster
from tests.chaos.ledger_view import LedgerView
from tests.chaos.report import Findings, Row
from tests.chaos.scenario import POSTGRES_SETTINGS, Setting
from tests.chaos.tenants import Tenant, Tenants, compare, reinforced, supervised
from tests.fakes.postgres import PostgresServer, new_server
from tests.faults.proxy import Fault, FaultProxy, read_head

_DATABASE = "tinsmith"
_PROXY_VARIABLE = "grpc_proxy"
_MAX_PAUSE_S = 0.6
_MAX_BYTES = {"request": 6_000, "answer": 3_000}


class TunnelProxy(FaultProxy):
    """Forwards connections to where each of them asks for by an HTTP CONNECT."""

    def __init__(self) -> None:
        super().__init__("", 0, timeout_s=600.0)

    def serve(self, client: socket.socket) -> None:
        with self._held(client), contextlib.suppress(OSError, ValueError):
            fault, dropped = self.next_fault(None)
            if not self._passes(client, fault, dropped):
                return
            head, rest = read_head(client)
            host, _, port = head.split(b" ")[1].decode().rpartition(":")
            with socket.create_connection((host, int(port)), timeout=600.0) as server:
                client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                server.sendall(rest)
                self._exchange(client, server, fault)

    def _exchange(self, client: socket.socket, server: socket.socket, fault: Fault) -> None:
        with self._held(server):
            back = self._start(
                lambda: self._pump(server, client, fault.cut_response_after, is_answer=True)
            )
            self._pump(client, server, fault.cut_request_after, is_answer=False)
            back.join(600.0)


def run(setting: Setting) -> Findings:
    """Cut connections, and compare with a calm run on the same pods."""
    num_cuts = 400 if setting.is_long else 30
    cuts: collections.Counter[str] = collections.Counter()
    postgres = new_server(POSTGRES_SETTINGS)
    try:
        url = postgres.create_database(_DATABASE)
        with (
            FaultProxy("127.0.0.1", postgres.port, timeout_s=600.0) as database,
            TunnelProxy() as calls,
            _grpc_through(calls),
            Cluster(
                setting.folder / "pods",
                setting.model_dir,
                database_url=url.replace(f":{postgres.port}/", f":{database.port}/"),
                num_samplers=1,
            ) as cluster,
        ):
            setting.say("the pods serve")
            proxies = {"database": database, "calls": calls}
            rows = _disturb(setting, cluster, postgres, proxies, num_cuts, cuts)
            opened = {name: proxy.num_connections for name, proxy in proxies.items()}
    finally:
        postgres.remove()
    return Findings(rows, {"cut": dict(sorted(cuts.items())), "connections": opened})


def _disturb(
    setting: Setting,
    cluster: Cluster,
    postgres: PostgresServer,
    proxies: dict[str, FaultProxy],
    num_cuts: int,
    cuts: collections.Counter[str],
) -> list[Row]:
    chance = random.Random(setting.seed)
    view = LedgerView(postgres, _DATABASE)
    tenants = Tenants(
        cluster, [Tenant("reading", supervised, 31), Tenant("playing", reinforced, 32)]
    )
    tenants.start()
    num_unfinished = 0
    try:
        while cuts.total() < num_cuts and not tenants.is_broken:
            time.sleep(chance.uniform(0.05, _MAX_PAUSE_S))
            where, kind = (
                chance.choice(sorted(proxies)),
                chance.choice(("all", "request", "answer")),
            )
            num_unfinished += bool(view.unfinished())
            _cut(proxies[where], kind, chance)
            cuts[f"{kind}, {where}"] += 1
            if cuts.total() % 10 == 0:
                setting.say(f"{cuts.total()} cuts, {view.num_finished()} operations finished")
    finally:
        for proxy in proxies.values():
            proxy.clear()
        disturbed = tenants.join()
    setting.say("the tenants have every result; now the calm run")
    calm = tenants.repeat(disturbed)
    return [
        Row(name="cuts", value=cuts.total(), target=num_cuts),
        Row(
            name="cuts while acknowledged operations were unfinished",
            value=num_unfinished,
            target=num_cuts // 2,
            better="higher",
        ),
        *view.check([training.run for training in disturbed.values()]),
        *compare(calm, disturbed),
    ]


def _cut(proxy: FaultProxy, kind: str, chance: random.Random) -> None:
    """Reset what is open, and have one of the next connections end in the middle of something."""
    proxy.clear()
    if kind == "request":
        proxy.add(Fault(cut_request_after=chance.randrange(_MAX_BYTES[kind]), times=2))
    elif kind == "answer":
        proxy.add(Fault(cut_response_after=chance.randrange(_MAX_BYTES[kind]), times=2))
    proxy.drop_connections()


@contextlib.contextmanager
def _grpc_through(proxy: FaultProxy) -> Iterator[None]:
    """Have gRPC of this process, and of those that it starts, use a proxy."""
    os.environ[_PROXY_VARIABLE] = f"http://{proxy.address}"
    try:
        yield
    finally:
        del os.environ[_PROXY_VARIABLE]
