"""Wires a gateway: connections, database, HTTP and gRPC behind one port."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from tinsmith.v1 import episode_pb2
from tinsmith_gateway.access.authentication import Callers, Credential
from tinsmith_gateway.app import create_app
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.project_threads import ProjectThreads
from tinsmith_gateway.proxy.grpc_proxy import PassThrough
from tinsmith_gateway.proxy.grpc_server import NativeServer
from tinsmith_gateway.services import Services
from tinsmith_gateway.serving.http_server import HttpServer
from tinsmith_gateway.serving.port_multiplexer import Front, FrontSettings, bind, load_tls
from tinsmith_gateway.serving.shutdown import Drain
from tinsmith_gateway.store.tables import STORE
from tinsmith_gateway.tinker import TinkerWire
from tinsmith_gateway.upstream.episode_keys import EpisodeKeys
from tinsmith_gateway.upstream.pod_client import Upstream
from tinsmith_gateway.upstream.pod_directory import Directory
from tinsmith_gateway.upstream.routing import EPISODE_SERVICE
from tinsmith_runtime.confined.process import ConfinedProcesses
from tinsmith_runtime.observability.metrics import MetricsServer
from tinsmith_runtime.pod.base import Pod
from tinsmith_runtime.rpc.auth import Caller
from tinsmith_runtime.rpc.body_reading import BodyReader
from tinsmith_runtime.rpc.in_flight import Limits
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient
from tinsmith_runtime.rpc.server import ServerConfig
from tinsmith_runtime.sql import Database, open_store

logger = logging.getLogger(__name__)

_COORDINATOR_TIMEOUT_S = 3.0
"""For one of several to say whether it knows a key."""


class GatewayPod(Pod):
    """One gateway, from its settings to its server.

    Args:
        config: Its settings.
        on_lost: Called if another gateway took over the shared database; the process must end.
    """

    def __init__(
        self, config: GatewayConfig, *, on_lost: Callable[[], None] = lambda: None
    ) -> None:
        self._config = config
        self._on_lost = on_lost
        credentials = PodCredentials.read(
            config.pod_key,
            PodRole.GATEWAY,
            previous=config.previous_pod_key,
            tls=config.tls(),
        )
        self._scheduler = SchedulerClient(config.scheduler_address, credentials)
        self._directory = Directory(config.scheduler_address, credentials)
        self._upstream = Upstream(self._directory, credentials, timeout_s=config.call_timeout_s)
        self._callers = Callers(
            self._scheduler.authenticator(),
            credentials=credentials,
            verify_episode_key=EpisodeKeys(self._coordinator_pools, self._ask_coordinator).verify,
            on_known=self._know,
        )
        self._limits = Limits(config.limits())
        self._drain = Drain()
        self._confined = ConfinedProcesses(config.confinement())
        self._database: Database | None = None
        self._tinker: TinkerWire | None = None
        self._metrics: MetricsServer | None = None
        self._listener: socket.socket | None = None
        self._http: HttpServer | None = None
        self._native: NativeServer | None = None
        self._front: Front | None = None
        self.address = ""
        """`host:port` that clients are given, `https://host:port` with TLS; empty before `bind`."""

    def bind(self) -> str:
        """Reserve the port and return the address, before anything is served.

        Raises:
            ConfigError: If the address cannot be bound.
        """
        if self._listener is None:
            self._listener = bind(self._config.listen_address)
            host, port = (
                self._config.listen_address.rpartition(":")[0],
                self._listener.getsockname()[1],
            )
            scheme = "https://" if self._config.tls_certificate is not None else ""
            self.address = f"{scheme}{host}:{port}"
        return self.address

    async def _start(self) -> None:
        """Recover what was promised, and serve.

        Raises:
            ConfigError: If an address cannot be bound, the database not be used, or the
                certificate not be read.
        """
        config = self._config
        tls = None
        if config.tls_certificate is not None and config.tls_key is not None:
            tls = await asyncio.to_thread(load_tls, config.tls_certificate, config.tls_key)
        self.bind()
        self._database = await open_store(
            STORE, config.data_dir, config.database_url, on_lost=self._on_lost
        )
        services = Services(
            config=config,
            callers=self._callers,
            upstream=self._upstream,
            database=self._database,
            anonymous=Credential(Caller("", None, ""), (), ""),
            limits=self._limits,
            drain=self._drain,
            confined=self._confined,
            threads=ProjectThreads(),
        )
        self._tinker = TinkerWire(services)
        await self._tinker.start()
        if config.metrics_address is not None:
            self._metrics = MetricsServer.start(config.metrics_address)
        self._http = HttpServer(
            create_app(services, self._tinker),
            drain_timeout_s=config.drain_timeout_s,
            head_timeout_s=config.handshake_timeout_s,
            max_head_bytes=config.max_head_bytes,
        )
        await self._http.start()
        self._native = NativeServer(self._native_config(), self._pass_through(), config.data_dir)
        socket_path = await self._native.start()
        self._front = Front(
            FrontSettings(
                max_connections=config.max_connections,
                max_unknown=config.max_unknown_connections,
                handshake_timeout_s=config.handshake_timeout_s,
                tls=tls,
            ),
            self._http,
            socket_path,
        )
        assert self._listener is not None
        await self._front.start(self._listener)
        logger.info("serving", extra={"address": self.address})

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish, close; what only waits is cut.

        Repeating it changes nothing.
        """
        self._drain.begin()
        if self._front is not None:
            self._front.stop_accepting()
        async with asyncio.TaskGroup() as group:
            for server in (self._native, self._http):
                if server is not None:
                    group.create_task(server.stop())
        if self._front is not None:
            await self._front.close()
        if self._listener is not None:
            self._listener.close()
        tinker, self._tinker = self._tinker, None
        if tinker is not None:
            await tinker.stop()
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            await asyncio.to_thread(metrics.stop)
        await asyncio.to_thread(self._confined.close)
        await self._upstream.close()
        await self._scheduler.close()
        database, self._database = self._database, None
        if database is not None:
            await database.close()
        logger.info("stopped", extra={"address": self.address})

    def _native_config(self) -> ServerConfig:
        config = self._config
        return ServerConfig(
            drain_timeout_s=config.drain_timeout_s,
            max_message_bytes=config.max_body_bytes,
            handshake_timeout_s=config.handshake_timeout_s,
        )

    def _pass_through(self) -> PassThrough:
        return PassThrough(
            self._callers,
            self._directory,
            self._upstream.channel,
            self._limits,
            self._drain,
            BodyReader(self._config.max_reads, deadline_s=self._config.body_deadline_s),
            max_call_s=self._config.max_native_call_s,
            pins_clients=self._config.pins_clients,
        )

    def _know(self, address: str) -> None:
        if self._front is not None:
            self._front.know(address)

    async def _coordinator_pools(self) -> set[str]:
        return {each.pool for each in await self._directory.workers("coordinator")}

    async def _ask_coordinator(self, pool: str, key: str) -> episode_pb2.Episode:
        is_only = len(await self._coordinator_pools()) <= 1
        return await self._upstream.call(
            EPISODE_SERVICE,
            "VerifyEpisodeKey",
            episode_pb2.VerifyEpisodeKeyRequest(api_key=key),
            episode_pb2.Episode,
            self._callers.for_pods("", pool),
            timeout_s=None if is_only else _COORDINATOR_TIMEOUT_S,
        )
