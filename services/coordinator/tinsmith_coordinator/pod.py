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
from tinsmith_coordinator.store.database import Clock, database_clock
from tinsmith_coordinator.store.tables import STORE
from tinsmith_runtime.pod.base import WorkerPod
from tinsmith_runtime.sql import Database, open_store


class CoordinatorPod(WorkerPod):
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
        super().__init__(config, scheduler_pb2.Worker.ROLE_COORDINATOR, domain=codec.DOMAIN)
        self._config = config
        self._clock = clock
        self._on_lost = on_lost
        self._bells = Bells()
        self._database: Database | None = None
        self._sweeper: Sweeper | None = None

    async def stop(self) -> None:
        """Refuse new calls, let running ones finish, close; repeating it changes nothing."""
        # Calls that wait for an episode are told to come again, or they would be waited for.
        self._bells.close()
        await super().stop()

    async def _open(self) -> None:
        """Take up what was left.

        On a shared database this waits for as long as another coordinator lives.
        """
        config = self._config
        self._database = database = await open_store(
            STORE.of_pool(config.pool),
            config.data_dir,
            config.database_url,
            on_lost=self._on_lost,
        )
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
        self._server.add(
            episode_pb2_grpc.add_EpisodeServiceServicer_to_server,
            EpisodeServicer(episodes, leases),
        )
        # What ran out while the pod was down is back in its queue before it may be submitted.
        while await self._sweeper.expire() == 0:
            pass
        self._sweeper.start()

    async def _close(self) -> None:
        if self._sweeper is not None:
            await self._sweeper.stop()
        if self._database is not None:
            await self._database.close()
        self._sweeper = self._database = None
