"""The coordinator as one object, which `__main__`, the embedded server and tests start alike.

Everything is built in `start`, because the database takes a lock that `stop` gives back.
"""

from __future__ import annotations

from collections.abc import Callable

from tinsmith.v1 import episode_pb2_grpc, scheduler_pb2
from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.episodes.episodes import Episodes
from tinsmith_coordinator.episodes.leases import Leases
from tinsmith_coordinator.episodes.sweeper import Sweeper
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.rpc import codec
from tinsmith_coordinator.rpc.servicer import EpisodeServicer
from tinsmith_coordinator.store.database import Clock, database_clock, open_database
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient, WorkerRegistration
from tinsmith_runtime.rpc.server import PodServer
from tinsmith_runtime.sql import Database


class CoordinatorPod:
    """One coordinator, from its settings to its listing at the scheduler.

    Args:
        config: Its settings.
        clock: The time, within a transaction; that of the database unless a test replaces it.
        on_lost: Called if another coordinator took over while this one was cut off from a shared
            database; the process must end.

    Raises:
        ConfigError: If the scheduler or the key of the pods is missing.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        clock: Clock = database_clock,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        if not config.scheduler_address or not config.pod_key:
            raise ConfigError("a coordinator needs scheduler_address and pod_key")
        self._config = config
        self._clock = clock
        self._on_lost = on_lost
        self._bells = Bells()
        self._database: Database | None = None
        self._scheduler: SchedulerClient | None = None
        self._server: PodServer | None = None
        self._sweeper: Sweeper | None = None
        self._registration: WorkerRegistration | None = None

    @property
    def address(self) -> str:
        """`host:port` that the pod listens on; empty before `start`."""
        return self._server.address if self._server is not None else ""

    @property
    def metrics_address(self) -> str:
        """`host:port` of the Prometheus endpoint; empty if there is none."""
        return self._server.metrics_address if self._server is not None else ""

    async def start(self) -> None:
        """Take up what was left, serve, register.

        On a shared database this waits for as long as another coordinator lives.

        Raises:
            ConfigError: If the data folder or an address is in use.
        """
        config = self._config
        self._bells = Bells()
        self._database = await open_database(
            config.data_dir, config.database_url, on_lost=self._on_lost
        )
        try:
            await self._serve(self._database)
        except BaseException:
            await self.stop()
            raise

    async def wait_listed(self, timeout_s: float) -> None:
        """Return once the scheduler lists this pod; see `WorkerRegistration.wait_listed`."""
        if self._registration is not None:
            await self._registration.wait_listed(timeout_s)

    async def stop(self) -> None:
        """Refuse new calls, let running ones finish, close; repeating it changes nothing."""
        # Calls that wait for an episode are told to come again, or they would be waited for.
        self._bells.close()
        if self._registration is not None:
            await self._registration.stop()
        if self._server is not None:
            await self._server.stop()
        if self._sweeper is not None:
            await self._sweeper.stop()
        if self._scheduler is not None:
            await self._scheduler.close()
        if self._database is not None:
            await self._database.close()
        self._registration = self._sweeper = None
        self._server = self._scheduler = self._database = None

    async def _serve(self, database: Database) -> None:
        config = self._config
        episodes = Episodes(
            database, self._bells, clock=self._clock, max_open=config.max_open_episodes
        )
        leases = Leases(
            database,
            self._bells,
            clock=self._clock,
            max_trajectory_bytes=config.max_trajectory_bytes,
        )
        self._sweeper = Sweeper(
            database,
            self._bells,
            clock=self._clock,
            interval_s=config.sweep_interval_s,
            retention_s=config.retention_s,
        )
        self._scheduler = SchedulerClient(config.scheduler_address, pod_key=config.pod_key)
        self._server = PodServer(
            config.server(), domain=codec.DOMAIN, authenticator=self._scheduler.authenticator()
        )
        self._server.add(
            episode_pb2_grpc.add_EpisodeServiceServicer_to_server,
            EpisodeServicer(episodes, leases),
        )
        # What ran out while the pod was down is back in its queue before it may be submitted.
        while await self._sweeper.expire() == 0:
            pass
        await self._server.start()
        self._sweeper.start()
        self._registration = WorkerRegistration(
            self._scheduler,
            scheduler_pb2.Worker(
                name=f"workers/{config.worker_name}",
                role=scheduler_pb2.Worker.ROLE_COORDINATOR,
                address=self._server.address,
                pool=config.pool,
            ),
        )
        self._registration.start()
