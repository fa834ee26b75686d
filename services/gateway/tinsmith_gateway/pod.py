"""Wires a gateway: connections, database, HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator

import uvicorn

from tinsmith.v1 import episode_pb2
from tinsmith_gateway.app import create_app
from tinsmith_gateway.callers import Callers, Credential
from tinsmith_gateway.config import GatewayConfig
from tinsmith_gateway.directory import Directory
from tinsmith_gateway.routing import EPISODE_SERVICE
from tinsmith_gateway.services import Services
from tinsmith_gateway.store import open_database
from tinsmith_gateway.tinker import TinkerWire
from tinsmith_gateway.upstream import Upstream
from tinsmith_runtime.auth import Caller
from tinsmith_runtime.metrics import MetricsServer
from tinsmith_runtime.scheduler_client import SchedulerClient
from tinsmith_runtime.sql import Database


class GatewayPod:
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
        self._scheduler = SchedulerClient(config.scheduler_address, pod_key=config.pod_key)
        directory = Directory(config.scheduler_address, pod_key=config.pod_key)
        self._upstream = Upstream(directory, timeout_s=config.call_timeout_s)
        self._callers = Callers(
            self._scheduler.authenticator(),
            pod_key=config.pod_key,
            verify_episode_key=self._verify_episode_key,
        )
        self._database: Database | None = None
        self._tinker: TinkerWire | None = None
        self._metrics: MetricsServer | None = None
        self._server: _HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.address = ""
        """`host:port` of the server; empty before `start`."""

    async def start(self) -> None:
        """Recover what was promised, and serve.

        Raises:
            ConfigError: If an address can not be bound or the database not be used.
        """
        config = self._config
        self._database = await open_database(
            config.data_dir, config.database_url, on_lost=self._on_lost
        )
        services = Services(
            config=config,
            callers=self._callers,
            upstream=self._upstream,
            database=self._database,
            nobody=Credential(Caller("", frozenset(), ""), (), ""),
        )
        self._tinker = TinkerWire(services)
        await self._tinker.start()
        if config.metrics_address is not None:
            self._metrics = MetricsServer.start(config.metrics_address)
        host, _, port = config.listen_address.rpartition(":")
        listener = socket.create_server((host, int(port)))
        self.address = f"{host}:{listener.getsockname()[1]}"
        self._server = _HttpServer(
            uvicorn.Config(
                create_app(services, self._tinker),
                log_config=None,
                access_log=False,
                lifespan="off",
            )
        )
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def stop(self) -> None:
        """Refuse new requests, let running ones finish, close."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = True
            await self._serving
        if self._tinker is not None:
            await self._tinker.stop()
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.stop)
        await self._upstream.close()
        await self._scheduler.close()
        if self._database is not None:
            await self._database.close()

    async def _verify_episode_key(self, key: str) -> episode_pb2.Episode:
        return await self._upstream.call(
            EPISODE_SERVICE,
            "VerifyEpisodeKey",
            episode_pb2.VerifyEpisodeKeyRequest(api_key=key),
            episode_pb2.Episode,
            self._callers.for_pods(""),
        )


class _HttpServer(uvicorn.Server):
    """Leaves the signals of the process to the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
