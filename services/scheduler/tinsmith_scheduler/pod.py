"""The scheduler as one object, which `__main__`, the embedded server and tests start alike.

Everything is built in `start`, because the database takes a lock that `stop` gives back.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from google.longrunning import operations_pb2_grpc

from tinsmith.v1 import (
    job_pb2_grpc,
    keys_pb2_grpc,
    run_metrics_pb2_grpc,
    scheduler_pb2_grpc,
    usage_pb2_grpc,
    workers_pb2_grpc,
)
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.fairness.token_buckets import TokenBuckets
from tinsmith_runtime.pod.base import Pod
from tinsmith_runtime.rpc.auth import ApiKey, Authenticator
from tinsmith_runtime.rpc.permissions import KeyRole
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_runtime.rpc.server import PodServer
from tinsmith_runtime.sql import Database, open_store
from tinsmith_scheduler.auth.api_keys import Keys
from tinsmith_scheduler.auth.audit import AuditTrail
from tinsmith_scheduler.config import SchedulerConfig
from tinsmith_scheduler.jobs.launcher import Launcher
from tinsmith_scheduler.jobs.local_launcher import LocalLauncher
from tinsmith_scheduler.rpc import codec
from tinsmith_scheduler.rpc.job_servicer import JobServicer
from tinsmith_scheduler.rpc.key_servicer import KeyServicer
from tinsmith_scheduler.rpc.operations_servicer import OperationsServicer
from tinsmith_scheduler.rpc.run_metrics_servicer import RunMetricsServicer
from tinsmith_scheduler.rpc.servicer import Domain, SchedulerServicer
from tinsmith_scheduler.rpc.trainer_client import GrpcTrainers
from tinsmith_scheduler.rpc.usage_servicer import UsageServicer
from tinsmith_scheduler.rpc.worker_servicer import WorkerServicer
from tinsmith_scheduler.run_metrics.metric_store import MetricLimits
from tinsmith_scheduler.run_metrics.run_metrics import RunMetrics
from tinsmith_scheduler.runs.checkpoint_lookup import CheckpointSources
from tinsmith_scheduler.runs.migration import Moves
from tinsmith_scheduler.runs.placement_attempts import Adoptions
from tinsmith_scheduler.runs.reaper import Reaper
from tinsmith_scheduler.runs.run_creation import Creations
from tinsmith_scheduler.runs.run_listing import RunListing
from tinsmith_scheduler.runs.run_retention import RunRetention
from tinsmith_scheduler.runs.runs import Runs
from tinsmith_scheduler.runs.sampling_sessions import SamplingSessions
from tinsmith_scheduler.runs.sessions import Sessions
from tinsmith_scheduler.runs.training_ends import TrainingEnds
from tinsmith_scheduler.store.job_reports import JobReports
from tinsmith_scheduler.store.tables import STORE
from tinsmith_scheduler.usage.usage import Usage
from tinsmith_scheduler.workers.workers import Workers

Clock = Callable[[], float]


_MISSED_HEARTBEATS = 2
"""After as many a session counts as silent."""
_METRICS_SAVED_S = 60.0
"""What of its rate of metrics a project may save up: a client that was cut off sends all at once.
"""


class SchedulerPod(Pod):
    """One scheduler.

    Args:
        config: Its settings.
        clock: Monotonic seconds, for everything that expires.
        on_lost: Called if another scheduler took over while this one was cut off from a shared
            database; the process must end.
        defer_jobs: Whether jobs wait for `start_jobs`, because what their drivers connect to is
            not there before.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        clock: Clock = time.monotonic,
        on_lost: Callable[[], None] = lambda: None,
        defer_jobs: bool = False,
    ) -> None:
        self._config = config
        self._clock = clock
        self._on_lost = on_lost
        self._defer_jobs = defer_jobs
        self._database: Database | None = None
        self._server: PodServer | None = None
        self._trainers: GrpcTrainers | None = None
        self._creations: Creations | None = None
        self._moves: Moves | None = None
        self.reaper: Reaper | None = None
        """Ends what has expired; None while nothing is served."""
        self._launcher: Launcher | None = None
        self._runs_jobs = False

    @property
    def address(self) -> str:
        """`host:port` that the pod listens on; empty before `start`."""
        return self._server.address if self._server is not None else ""

    @property
    def metrics_address(self) -> str:
        """`host:port` of the Prometheus endpoint; empty if there is none."""
        return self._server.metrics_address if self._server is not None else ""

    async def stop(self) -> None:
        """Refuse new calls, let running ones finish, close; repeating it changes nothing."""
        await self.stop_jobs()
        if self._creations is not None:
            self._creations.release_waiters()
        if self._server is not None:
            await self._server.stop()
        if self.reaper is not None:
            await self.reaper.stop()
        if self._creations is not None:
            await self._creations.stop()
        if self._moves is not None:
            await self._moves.stop()
        if self._trainers is not None:
            await self._trainers.close()
        if self._database is not None:
            await self._database.close()
        self._database = self._server = self._trainers = None
        self._creations = self._moves = self.reaper = None

    def _make_launcher(
        self, database: Database, keys: Keys, reports: JobReports, workers: Workers
    ) -> Launcher | None:
        config = self._config
        if config.job_launcher == "local":
            return LocalLauncher(
                database,
                keys=keys,
                reports=reports,
                workers=workers,
                data_dir=config.data_dir,
                max_jobs=config.max_local_jobs,
                stop_timeout_s=config.local_job_stop_timeout_s,
                variables=config.further_variables(),
                wall_clock=time.time,
            )
        if config.job_launcher == "kubernetes":
            return _kubernetes_launcher(config)
        return None

    def _make_run_metrics(self, database: Database) -> RunMetrics:
        config = self._config
        limits = MetricLimits(
            max_names=config.max_metrics_per_run,
            max_run_bytes=config.max_metric_bytes_per_run,
            max_project_bytes=config.max_metric_bytes_per_project,
        )
        per_s = config.max_metric_points_per_s
        rate = TokenBuckets(_METRICS_SAVED_S * per_s, per_s, clock=self._clock, lends=True)
        return RunMetrics(database, limits=limits, rate=rate, wall_clock=time.time)

    async def start_jobs(self, address: str) -> None:
        """Go on with jobs, once the server is there that their drivers connect to."""
        if self._launcher is not None and not self._runs_jobs:
            self._runs_jobs = True
            await self._launcher.start(address)

    async def stop_jobs(self) -> None:
        """Let the drivers of this machine save and end; repeating it changes nothing."""
        if self._launcher is not None and self._runs_jobs:
            self._runs_jobs = False
            await self._launcher.stop()

    async def _start(self) -> None:
        """Recover what was left unfinished, and serve.

        On a shared database this waits for as long as another scheduler lives.

        Raises:
            ConfigError: If the data folder or an address is in use, or the bootstrap key clashes.
        """
        config = self._config
        self._database = database = await open_store(
            STORE, config.data_dir, config.database_url, on_lost=self._on_lost
        )
        credentials = PodCredentials.read(
            config.pod_key,
            PodRole.SCHEDULER,
            previous=config.previous_pod_key,
            tls=config.tls(),
        )
        keys = Keys(
            database,
            operator_project=config.bootstrap_project,
            wall_clock=time.time,
            pod_roots=credentials.roots,
        )
        await keys.load()
        if config.bootstrap_key:
            await keys.ensure(
                ApiKey.parse(config.bootstrap_key),
                project=config.bootstrap_project,
                role=KeyRole.ADMIN,
            )
        self._trainers = GrpcTrainers(credentials, timeout_s=config.trainer_call_timeout_s)
        workers = Workers(database, timeout_s=config.worker_timeout_s, clock=self._clock)
        await workers.load()
        sessions = Sessions(
            database,
            timeout_s=config.session_timeout_s,
            silent_s=_MISSED_HEARTBEATS * config.heartbeat_interval_s,
            max_per_project=config.max_sessions_per_project,
            clock=self._clock,
            wall_clock=time.time,
        )
        await sessions.load()
        adoptions = Adoptions(database, workers=workers, trainers=self._trainers)
        self._moves = Moves(
            database,
            workers=workers,
            adoptions=adoptions,
            interval_s=config.reap_interval_s,
            retry_s=config.placement_retry_s,
        )
        self._creations = Creations(
            database,
            adoptions=adoptions,
            trainers=self._trainers,
            encode_error=codec.encode_error,
            timeout_s=config.placement_timeout_s,
            retry_s=config.placement_retry_s,
            clock=self._clock,
        )
        sources = CheckpointSources(database, workers=workers, trainers=self._trainers)
        runs = Runs(
            database,
            workers=workers,
            trainers=self._trainers,
            creations=self._creations,
            sources=sources,
            sessions=sessions,
            max_runs_per_project=config.max_runs_per_project,
            wall_clock=time.time,
        )
        sampling_sessions = SamplingSessions(
            database,
            workers=workers,
            sources=sources,
            max_per_project=config.max_sampling_sessions_per_project,
            wall_clock=time.time,
        )
        self.reaper = Reaper(
            database,
            sessions=sessions,
            workers=workers,
            trainers=self._trainers,
            interval_s=config.reap_interval_s,
            audit_retention_s=config.audit_retention_s,
            ended_retention_s=config.ended_retention_s,
            keys=keys,
            clock=self._clock,
            wall_clock=time.time,
        )
        usage = Usage(database, clock=self._clock, wall_clock=time.time)
        await usage.load()
        reports = JobReports(database, key_of=keys.of_caller, wall_clock=time.time)
        self._launcher = launcher = self._make_launcher(database, keys, reports, workers)
        domain = Domain(
            sessions,
            sampling_sessions,
            runs,
            RunListing(database, workers=workers, trainers=self._trainers),
            RunRetention(
                database,
                runs=runs,
                workers=workers,
                trainers=self._trainers,
                wall_clock=time.time,
            ),
            TrainingEnds(database, wall_clock=time.time),
            self._creations,
            self._moves,
            workers,
            sources,
            AuditTrail(database, keys=keys),
        )
        self._server = PodServer(
            config.server(),
            domain=codec.DOMAIN,
            authenticator=Authenticator(keys, roots=credentials.roots),
        )
        self._server.add(
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            SchedulerServicer(domain, config),
        )
        self._server.add(keys_pb2_grpc.add_KeyServiceServicer_to_server, KeyServicer(keys))
        self._server.add(
            workers_pb2_grpc.add_WorkerServiceServicer_to_server,
            WorkerServicer(
                workers,
                self._moves,
                heartbeat_interval_s=config.worker_heartbeat_interval_s,
            ),
        )
        self._server.add(
            job_pb2_grpc.add_JobServiceServicer_to_server,
            JobServicer(launcher, reports, keys, database, wall_clock=time.time),
        )
        self._server.add(
            run_metrics_pb2_grpc.add_RunMetricsServiceServicer_to_server,
            RunMetricsServicer(self._make_run_metrics(database)),
        )
        self._server.add(
            usage_pb2_grpc.add_UsageServiceServicer_to_server, UsageServicer(usage, keys)
        )
        self._server.add(
            operations_pb2_grpc.add_OperationsServicer_to_server, OperationsServicer(domain)
        )
        await self._server.start()
        await self._creations.load()
        await self._moves.start()
        self.reaper.start()
        if not self._defer_jobs:
            await self.start_jobs(config.job_address or self.address)


def _kubernetes_launcher(config: SchedulerConfig) -> Launcher:
    # Not above: only a scheduler of a cluster has the packages that this needs.
    try:
        from tinsmith_scheduler.jobs.kubernetes_launcher import KubernetesLauncher
    except ImportError as error:
        raise ConfigError(
            "job_launcher kubernetes needs packages that are not installed: pip install "
            "'tinsmith[scheduler,cluster]'"
        ) from error
    return KubernetesLauncher(config.namespaces(), timeout_s=config.cluster_call_timeout_s)
