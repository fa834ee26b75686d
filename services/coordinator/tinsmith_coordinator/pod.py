"""The coordinator as one object, which `__main__`, the embedded server and tests start alike.

Everything is built in `start`, because the database takes a lock that `stop` gives back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.longrunning import operations_pb2_grpc

from tinsmith.rpc.event_loop_thread import handle_loop_exception
from tinsmith.v1 import coordinator_pb2_grpc, episode_pb2_grpc, workers_pb2
from tinsmith_coordinator.config import CoordinatorConfig
from tinsmith_coordinator.episodes.episodes import Episodes
from tinsmith_coordinator.episodes.leases import Leases
from tinsmith_coordinator.episodes.sweeper import Sweeper
from tinsmith_coordinator.episodes.waiters import Bells
from tinsmith_coordinator.matches.keeper import MatchKeeper
from tinsmith_coordinator.matches.matches import Matches
from tinsmith_coordinator.matches.seats import Seats
from tinsmith_coordinator.rollouts.batches import RolloutBatches
from tinsmith_coordinator.rollouts.driver import RolloutDriver
from tinsmith_coordinator.rollouts.keeper import RolloutKeeper
from tinsmith_coordinator.rollouts.players import Players
from tinsmith_coordinator.rpc import codec
from tinsmith_coordinator.rpc.coordinator_servicer import CoordinatorServicer
from tinsmith_coordinator.rpc.rollout_servicer import OperationsServicer
from tinsmith_coordinator.rpc.service_players import ServicePlayers
from tinsmith_coordinator.rpc.servicer import EpisodeServicer
from tinsmith_coordinator.store.database import Clock, database_clock
from tinsmith_coordinator.store.tables import STORE
from tinsmith_runtime.fairness.fair_slots import FairSlots
from tinsmith_runtime.pod.base import WorkerPod
from tinsmith_runtime.sql import Database, open_store


class CoordinatorPod(WorkerPod):
    """One coordinator, from its settings to its listing at the scheduler.

    Args:
        config: Its settings.
        clock: The time, within a transaction; that of the database unless a test replaces it.
        on_lost: Called if another coordinator took over while this one was cut off from a shared
            database; the process must end.
        players: Plays rollouts; over the other pods unless a test replaces it.

    Raises:
        ConfigError: If the scheduler or the key of the pods is missing.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        *,
        clock: Clock = database_clock,
        on_lost: Callable[[], None] = lambda: None,
        players: Players | None = None,
    ) -> None:
        super().__init__(config, workers_pb2.Worker.ROLE_COORDINATOR, domain=codec.DOMAIN)
        self._config = config
        self._clock = clock
        self._on_lost = on_lost
        self._bells = Bells()
        self._database: Database | None = None
        self._sweeper: Sweeper | None = None
        self._players = players or ServicePlayers(config.scheduler_address, self._credentials)
        self._driver: RolloutDriver | None = None

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
        matches = Matches(
            database, self._bells, clock=self._clock, max_open=config.max_open_matches
        )
        seats = Seats(database, self._bells, clock=self._clock)
        keeper = MatchKeeper(
            database, self._bells, clock=self._clock, retention_s=config.retention_s
        )
        self._sweeper = Sweeper(
            database,
            self._bells,
            clock=self._clock,
            interval_s=config.sweep_interval_s,
            retention_s=config.retention_s,
            keepers=[
                keeper,
                RolloutKeeper(
                    database,
                    clock=self._clock,
                    retention_s=config.rollout_retention_s,
                    max_bytes=config.max_rollout_bytes,
                ),
            ],
        )
        batches = self._open_rollouts(database)
        self._server.add(
            episode_pb2_grpc.add_EpisodeServiceServicer_to_server,
            EpisodeServicer(episodes, leases),
        )
        self._server.add(
            coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server,
            CoordinatorServicer(matches, seats, *batches),
        )
        self._server.add(
            operations_pb2_grpc.add_OperationsServicer_to_server, OperationsServicer(*batches)
        )
        await keeper.excuse()
        # What ran out while the pod was down is back in its queue before it may be submitted.
        while await self._sweeper.expire() == 0:
            pass
        self._sweeper.start()
        await batches[1].resume()

    def _open_rollouts(self, database: Database) -> tuple[RolloutBatches, RolloutDriver]:
        """Return the batches of rollouts, and what plays them."""
        config = self._config
        loop = asyncio.get_running_loop()
        if loop.get_exception_handler() is None:
            # Episodes are played in an event loop of their own.
            loop.set_exception_handler(handle_loop_exception)
        driver = self._driver = RolloutDriver(
            database,
            self._bells,
            self._players,
            slots=FairSlots(config.max_playing_episodes, config.max_playing_episodes_of_project),
            require_good=self._scheduler.authenticator().require_good,
            clock=self._clock,
            max_trajectory_bytes=config.max_rollout_trajectory_bytes,
            max_bytes=config.max_rollout_bytes,
        )
        batches = RolloutBatches(
            database,
            self._bells,
            driver,
            self._players,
            clock=self._clock,
            max_open=config.max_open_rollouts,
            max_episodes=config.max_rollout_episodes,
            max_tokens=config.max_rollout_tokens,
        )
        return batches, driver

    async def _close(self) -> None:
        if self._driver is not None:
            await self._driver.stop()
        await self._players.close()
        if self._sweeper is not None:
            await self._sweeper.stop()
        if self._database is not None:
            await self._database.close()
        self._sweeper = self._database = self._driver = None
