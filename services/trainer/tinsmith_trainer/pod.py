"""Wires a trainer: engines, ledger, store, cycle, server, registration.

Used by `python -m tinsmith_trainer`, and by the embedded server, which hands in engines and their
thread because its sampler shares them.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable

from google.longrunning import operations_pb2_grpc

from tinsmith.v1 import scheduler_pb2, trainer_pb2_grpc
from tinsmith_engine import Engine, Published
from tinsmith_engine.contract.model_catalog import ModelCatalog
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints, storage
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.ledger import Holder, Ledger, PostgresLedger, SqliteLedger
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient, WorkerRegistration
from tinsmith_runtime.rpc.server import PodServer
from tinsmith_runtime.tokenizer_files import require_tokenizers
from tinsmith_trainer.checkpoints.audit import AuditTrail
from tinsmith_trainer.checkpoints.downloads import Downloads
from tinsmith_trainer.checkpoints.expiry import CheckpointSweeper
from tinsmith_trainer.checkpoints.files import CheckpointFiles
from tinsmith_trainer.checkpoints.registry import CheckpointRegistry
from tinsmith_trainer.checkpoints.tasks import CheckpointTasks
from tinsmith_trainer.checkpoints.transfers import CheckpointWork
from tinsmith_trainer.checkpoints.uploads import Uploads
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.cycle.checkpoint_operations import CheckpointSlices
from tinsmith_trainer.cycle.committer import Committer
from tinsmith_trainer.cycle.loop import Cycle
from tinsmith_trainer.cycle.operation_reader import OperationReader
from tinsmith_trainer.cycle.run_tasks import SoloWork
from tinsmith_trainer.cycle.sequence_gaps import GapWatcher
from tinsmith_trainer.ownership.adoption import RunPlacement
from tinsmith_trainer.ownership.lease import LeaseKeeper
from tinsmith_trainer.ownership.result_retention import RetentionSweeper, Retrievals
from tinsmith_trainer.ownership.run_registry import RunRegistry
from tinsmith_trainer.residency.weight_publisher import Publisher
from tinsmith_trainer.rpc import training_codec
from tinsmith_trainer.rpc.checkpoint_codec import StoredTasks
from tinsmith_trainer.rpc.checkpoint_servicer import CheckpointDomain
from tinsmith_trainer.rpc.operations_servicer import OperationsServicer
from tinsmith_trainer.rpc.training_servicer import TrainerServicer

logger = logging.getLogger(__name__)


def load_engines(config: TrainerConfig, load: Callable[..., Engine] = Engine.load) -> EngineHost:
    """Load the base models of a trainer, each with `load`.

    Raises:
        ModelNotFoundError: If one is neither a directory nor a model of the hub, or has no
            tokenizer.
    """
    models = config.models()
    require_tokenizers(models)
    host = EngineHost.load(
        models,
        dtype=config.dtype,
        device=config.device,
        num_threads=config.num_threads or None,
        exact=config.exact,
        compiled=config.compiled,
        max_resident_runs=config.max_resident_runs,
        load=load,
    )
    # Those of the hub are here now.
    require_tokenizers(host.directories)
    return host


class TrainerPod:
    """A trainer, from its settings to its server.

    Args:
        config: Settings.
        host: Base models; loaded by `load_engines`.
        on_fenced: Called when another process holds a run of this one, which must then exit.
        on_failed: Called when the pod cannot go on because of a bug; it then reports unhealthy.
        wall_clock: Seconds since the epoch, for what expires.
    """

    def __init__(
        self,
        config: TrainerConfig,
        host: EngineHost,
        *,
        on_fenced: Callable[[FencedError], None],
        on_failed: Callable[[Exception], None] = lambda _: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        if not config.scheduler_address or not config.pod_key:
            raise ConfigError("a trainer needs scheduler_address and pod_key")
        self._config = config
        self._host = host
        self._catalog = ModelCatalog.of(host)
        self._ledger = _ledger_of(config)
        self._store = storage.open(config.storage())
        wire = training_codec.StoredCodec(self._store.uri)
        self._registry = RunRegistry(config, self._host, self._ledger, self._store, wire)
        files = CheckpointFiles(self._store, config.data_dir / "scratch")
        checkpoints = CheckpointRegistry(self._host, self._ledger, self._store, files, wall_clock)
        uploads = Uploads(
            config.data_dir / "uploads", max_bytes=config.max_import_bytes, clock=wall_clock
        )
        work = CheckpointWork(
            self._host,
            self._ledger,
            checkpoints,
            files,
            uploads,
            shard_bytes=config.export_shard_bytes,
            clock=wall_clock,
        )
        self._tasks = CheckpointTasks(
            self._ledger,
            work,
            StoredTasks(self._store.uri),
            find_run=self._registry.held,
            clock=wall_clock,
        )
        domain = CheckpointDomain(
            registry=checkpoints,
            work=work,
            tasks=self._tasks,
            uploads=uploads,
            downloads=Downloads(files, config.pod_key, wall_clock),
            audit=AuditTrail(self._ledger, wall_clock),
            store_uri=self._store.uri,
            clock=wall_clock,
        )
        retrievals = Retrievals(wall_clock)
        reader = OperationReader(self._ledger, retrievals)
        self._publisher = Publisher(self._host, self._store, self._registry.residency)
        committer = Committer(self._ledger, wire, self._registry.finish)
        residency = self._registry.residency
        saves = CheckpointSlices(checkpoints, committer, residency, wire)
        solo = SoloWork(residency, committer, saves, max_attempts=config.max_attempts)
        self._placement = RunPlacement(
            config, self._host, self._ledger, self._store, self._registry, wire
        )
        self._placement.on_adopted = self._tasks.recover
        self._sweeper = CheckpointSweeper(
            self._ledger,
            checkpoints,
            uploads,
            # Tasks that were accepted while their run moved, and files that could not be removed.
            chores=(self._tasks.recover, self._placement.remove_leftovers),
            audit_retention_s=config.audit_retention_s,
            interval_s=config.checkpoint_sweep_interval_s,
            clock=wall_clock,
        )
        self._lease = LeaseKeeper(self._ledger, self._registry, ttl_s=config.lease_ttl_s)
        self._retention = RetentionSweeper(
            self._registry,
            self._ledger,
            self._store,
            self._lease,
            retrievals,
            retrieved_s=config.result_retention_s,
            unretrieved_s=config.unretrieved_retention_s,
            clock=wall_clock,
        )
        self._cycle = Cycle(
            config, self._registry, self._host, committer, solo, self._lease, on_end=self._note_end
        )
        self._registry.on_fenced = self._note_end
        self._registry.obstacle = self._lease.obstacle
        self._gaps = GapWatcher(config.gap_timeout_s, self._registry, self._ledger, committer, wire)
        self._on_fenced = on_fenced
        self._on_failed = on_failed
        self._farewell: asyncio.Task[None] | None = None
        self._scheduler = SchedulerClient(config.scheduler_address, pod_key=config.pod_key)
        self._server = PodServer(
            config.server(),
            domain=training_codec.DOMAIN,
            authenticator=self._scheduler.authenticator(),
        )
        servicer = TrainerServicer(
            config,
            self._registry,
            self._placement,
            self._lease,
            reader,
            domain,
            self._publisher,
            self._catalog,
        )
        self._server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer)
        self._server.add(
            operations_pb2_grpc.add_OperationsServicer_to_server,
            OperationsServicer(self._registry, reader, self._tasks),
        )
        self._registration: WorkerRegistration | None = None

    @property
    def address(self) -> str:
        """`host:port` of the server."""
        return self._server.address

    @property
    def metrics_address(self) -> str:
        """`host:port` of the Prometheus endpoint."""
        return self._server.metrics_address

    async def start(self) -> None:
        """Recover, serve, register.

        Raises:
            ConfigError: If the database, the object store or the data folder cannot be used.
            StorageUnavailableError: If an accepted request is in the store, which is away.
        """
        await asyncio.to_thread(storage.probe_at_start, self._store)
        await self._ledger.open()
        if self._ledger.is_shared:
            await self._lease.renew()
        else:
            await self._placement.recover()
        await self._tasks.recover()
        self._sweeper.start()
        self._cycle.start(
            self._gaps.watch(),
            self._lease.keep(),
            self._ledger.watch_lease(self._lease.look),
            self._retention.watch(),
        )
        await self._server.start()
        self._registration = WorkerRegistration(
            self._scheduler, self._describe(), self._catalog.tokenizers
        )
        self._registration.start()

    async def wait_listed(self, timeout_s: float) -> None:
        """Return once the scheduler lists this pod; see `WorkerRegistration.wait_listed`."""
        if self._registration is not None:
            await self._registration.wait_listed(timeout_s)

    async def stop(self) -> None:
        """Finish running calls and the slice that is being computed; park what is resident."""
        if self._registration is not None:
            await self._registration.stop()
        await self._server.stop()
        await self._sweeper.stop()
        await self._tasks.stop()
        await self._cycle.stop()
        await self._retention.flush()
        await self._placement.park_all()
        if self._ledger.is_shared:
            failpoints.passing("trainer.leave")
            await self._ledger.leave()
            failpoints.passing("trainer.left")
            if self._registration is not None:
                await self._registration.leave()
        await self._scheduler.close()
        await self._ledger.close()

    def _note_end(self, error: Exception) -> None:
        """Say at once that nothing is executed any more."""
        self._farewell = asyncio.create_task(self._server.report_unhealthy())
        if isinstance(error, FencedError):
            self._on_fenced(error)
        else:
            self._on_failed(error)

    async def sweep_checkpoints(self) -> None:
        """Remove now what expired, as is done in intervals."""
        await self._sweeper.sweep()

    async def publish_live(self, run: str) -> Published:
        """Copy the newest weights of a run to an immutable version, for a sampler in this process.

        Raises:
            RunNotFoundError: If this trainer does not hold the run.
        """
        return await self._publisher.publish_live(self._registry.get(run))

    def _describe(self) -> scheduler_pb2.Worker:
        return scheduler_pb2.Worker(
            name=f"workers/{self._config.worker_name}",
            role=scheduler_pb2.Worker.ROLE_TRAINER,
            address=self._server.address,
            models=self._catalog.select(""),
            max_runs=self._config.max_runs,
            incarnation=self._ledger.incarnation,
            ledger=self._ledger.identity,
            pool=self._config.pool,
        )


def _ledger_of(config: TrainerConfig) -> Ledger:
    """Return the ledger that the settings name; it is opened by the start of the pod."""
    if not config.database_url:
        return SqliteLedger(config.data_dir / "trainer.db")
    holder = Holder(worker=config.worker_name, incarnation=uuid.uuid4().hex)
    return PostgresLedger(config.database_url, holder=holder)
