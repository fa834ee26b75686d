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
from dataclasses import dataclass

from google.longrunning import operations_pb2_grpc

from tinsmith.v1 import (
    checkpoint_pb2_grpc,
    trainer_control_pb2_grpc,
    trainer_pb2_grpc,
    workers_pb2,
)
from tinsmith_engine import WeightVersion
from tinsmith_engine.contract.model_catalog import ModelCatalog
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import failpoints, storage
from tinsmith_runtime.errors import TinsmithError
from tinsmith_runtime.ledger import Holder, Ledger, PostgresLedger, SqliteLedger, store_id
from tinsmith_runtime.ledger.records import FencedError
from tinsmith_runtime.observability.disk import measure_disk
from tinsmith_runtime.pod.base import WorkerPod
from tinsmith_runtime.rpc.scheduler_client import SchedulerClient
from tinsmith_runtime.rpc.usage_reporter import UsageReporter
from tinsmith_runtime.storage import ObjectStore
from tinsmith_runtime.usage import BudgetGate
from tinsmith_trainer.checkpoints.audit import AuditTrail
from tinsmith_trainer.checkpoints.downloads import Downloads
from tinsmith_trainer.checkpoints.expiry import CheckpointSweeper
from tinsmith_trainer.checkpoints.files import CheckpointFiles
from tinsmith_trainer.checkpoints.registry import CheckpointRegistry
from tinsmith_trainer.checkpoints.tasks import CheckpointTasks
from tinsmith_trainer.checkpoints.transfers import CheckpointWork
from tinsmith_trainer.checkpoints.uploads import MAX_CONFIG_BYTES, Uploads
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.cycle.checkpoint_operations import CheckpointSlices
from tinsmith_trainer.cycle.committer import Committer
from tinsmith_trainer.cycle.loop import Cycle
from tinsmith_trainer.cycle.operation_reader import OperationReader
from tinsmith_trainer.cycle.run_tasks import RunTasks
from tinsmith_trainer.cycle.sequence_gaps import GapWatcher
from tinsmith_trainer.cycle.step_metrics import StepMetrics
from tinsmith_trainer.metrics import DATA_FREE_BYTES, DATA_SIZE_BYTES
from tinsmith_trainer.ownership.adoption import RunAdoption
from tinsmith_trainer.ownership.lease import Lease
from tinsmith_trainer.ownership.result_retention import RetentionSweeper, Retrievals
from tinsmith_trainer.ownership.run_registry import RunRegistry
from tinsmith_trainer.ownership.usage_log import LedgerUsage
from tinsmith_trainer.residency.manager import Residency
from tinsmith_trainer.residency.weight_exporter import WeightExporter
from tinsmith_trainer.residency.weight_exports import WeightExports
from tinsmith_trainer.rpc import training_codec
from tinsmith_trainer.rpc.checkpoint_codec import StoredTasks
from tinsmith_trainer.rpc.checkpoint_servicer import CheckpointDomain, CheckpointServicer
from tinsmith_trainer.rpc.control_servicer import TrainerControlServicer
from tinsmith_trainer.rpc.metrics_recorder import MetricsRecorder
from tinsmith_trainer.rpc.operations_servicer import OperationsServicer
from tinsmith_trainer.rpc.training_servicer import TrainerServicer
from tinsmith_trainer.runs.operations import WireCodec
from tinsmith_trainer.runs.run import LiveRun
from tinsmith_trainer.runs.storage_cleanup import READERS_GRACE_S

logger = logging.getLogger(__name__)

_STOP_PATIENCE_S = 5.0
"""How long a stop waits for a database that is away."""


@dataclass(frozen=True, slots=True)
class Foundation:
    """What every part of a trainer stands on.

    Attributes:
        config: Settings.
        host: Base models, each in an engine.
        ledger: Where runs, operations and results become durable.
        store: Files of snapshots, checkpoints and large requests.
        wire: The stored form of requests and results.
        clock: Seconds since the epoch, for what expires.
        budgets: Refuses what a project has no budget left for.
    """

    config: TrainerConfig
    host: EngineHost
    ledger: Ledger
    store: ObjectStore
    wire: WireCodec
    clock: Callable[[], float]
    budgets: BudgetGate


@dataclass(frozen=True, slots=True)
class Runs:
    """The runs of a trainer and what decides about them.

    Attributes:
        registry: Accepts operations.
        lease: Says whether this process may answer for its runs.
        residency: Brings runs into the engines and out of them.
        has_work: Set when a run may have something to do.
    """

    registry: RunRegistry
    lease: Lease
    residency: Residency
    has_work: asyncio.Event


def build_foundation(
    config: TrainerConfig, host: EngineHost, clock: Callable[[], float]
) -> Foundation:
    """Return the ledger and the store that the settings name; the start of the pod opens them."""
    ledger: Ledger
    store = storage.open(config.storage())
    if config.database_url:
        holder = Holder(worker=config.worker_name, incarnation=uuid.uuid4().hex)
        ledger = PostgresLedger(config.database_url, holder=holder, store=store_id(store.uri))
    else:
        ledger = SqliteLedger(config.data_dir / "trainer.db")
    wire = training_codec.StoredCodec(store.uri)
    return Foundation(config, host, ledger, store, wire, clock, BudgetGate())


def build_runs(base: Foundation, *, on_fenced: Callable[[Exception], None]) -> Runs:
    """Return the runs, empty, and what decides about them.

    Args:
        base: Ledger, store and engines.
        on_fenced: Called when a write finds that another process holds a run.
    """
    held: dict[str, LiveRun] = {}
    has_work = asyncio.Event()
    lease = Lease(base.ledger, held, ttl_s=base.config.lease_ttl_s)
    residency = Residency(
        base.host,
        base.ledger,
        base.store,
        base.wire,
        held.values(),
        max_resident_runs=base.config.max_resident_runs,
        max_parked_bytes=base.config.max_parked_bytes,
        num_history_snapshots=base.config.history_snapshots,
        wall_clock=base.clock,
    )
    registry = RunRegistry(
        base.config,
        held,
        base.ledger,
        base.store,
        base.wire,
        has_work=has_work,
        obstacle=lease.obstacle,
        on_fenced=on_fenced,
        budgets=base.budgets,
    )
    return Runs(registry, lease, residency, has_work)


def build_checkpoints(
    base: Foundation, registry: RunRegistry, scheduler: SchedulerClient
) -> CheckpointDomain:
    """Return what the checkpoint calls are mapped onto."""
    config, clock = base.config, base.clock
    files = CheckpointFiles(base.store, config.data_dir / "scratch")
    checkpoints = CheckpointRegistry(
        base.host,
        base.ledger,
        base.store,
        files,
        clock,
        max_checkpoints=config.max_project_checkpoints,
        max_exports=config.max_project_exports,
    )
    uploads = Uploads(
        config.data_dir / "uploads",
        max_bytes=config.max_import_bytes,
        max_project_bytes=max(
            config.max_project_upload_bytes, config.max_import_bytes + MAX_CONFIG_BYTES
        ),
        clock=clock,
    )
    work = CheckpointWork(
        base.host,
        base.ledger,
        checkpoints,
        files,
        uploads,
        shard_bytes=config.export_shard_bytes,
        clock=clock,
    )
    return CheckpointDomain(
        registry=checkpoints,
        work=work,
        tasks=CheckpointTasks(
            base.ledger, work, StoredTasks(base.store.uri), find_run=registry.wake, clock=clock
        ),
        uploads=uploads,
        downloads=Downloads(
            files, config.pod_key, clock, lambda key_id: scheduler.verify_key(key_id, b"")
        ),
        audit=AuditTrail(base.ledger, clock),
        store_uri=base.store.uri,
        clock=clock,
        budgets=base.budgets,
    )


def build_cycle(
    base: Foundation,
    runs: Runs,
    checkpoints: CheckpointRegistry,
    step_metrics: StepMetrics,
    *,
    on_end: Callable[[Exception], None],
) -> tuple[Cycle, GapWatcher]:
    """Return what executes operations, and what ends those that wait for a missing number."""
    committer = Committer(
        base.ledger,
        base.wire,
        runs.registry.finish,
        budgets=base.budgets,
        note=step_metrics.note,
    )
    saves = CheckpointSlices(checkpoints, committer, runs.residency, base.wire)
    run_tasks = RunTasks(runs.residency, committer, saves, max_attempts=base.config.max_attempts)
    cycle = Cycle(
        base.config,
        runs.registry,
        runs.residency,
        base.host,
        committer,
        run_tasks,
        runs.lease,
        has_work=runs.has_work,
        on_end=on_end,
    )
    gaps = GapWatcher(
        base.config.gap_timeout_s, runs.registry, runs.residency, base.ledger, committer, base.wire
    )
    return cycle, gaps


class TrainerPod(WorkerPod):
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
        self._config = config
        self._on_fenced = on_fenced
        self._on_failed = on_failed
        self._farewell: asyncio.Task[None] | None = None
        self._catalog = ModelCatalog.of(host)
        super().__init__(
            config,
            workers_pb2.Worker.ROLE_TRAINER,
            domain=training_codec.DOMAIN,
            tokenizers=self._catalog.tokenizers,
        )
        base = build_foundation(config, host, wall_clock)
        self._ledger, self._store = base.ledger, base.store
        runs = build_runs(base, on_fenced=self._note_end)
        self._registry, self._residency, self._lease = runs.registry, runs.residency, runs.lease
        checkpoints = build_checkpoints(base, runs.registry, self._scheduler)
        self._tasks = checkpoints.tasks
        self._exports = WeightExports(config.max_exported_bytes, grace_s=READERS_GRACE_S)
        self._weight_exporter = WeightExporter(
            host,
            base.ledger,
            base.store,
            runs.residency,
            exports=self._exports,
            clock=wall_clock,
        )
        self._adoption = RunAdoption(
            config,
            host,
            base.ledger,
            base.store,
            runs.registry,
            runs.residency,
            self._weight_exporter,
            base.wire,
            has_work=runs.has_work,
            on_adopted=checkpoints.tasks.recover,
        )
        self._sweeper = CheckpointSweeper(
            base.ledger,
            checkpoints.registry,
            checkpoints.uploads,
            # Tasks that were accepted while their run moved, and files that could not be removed.
            chores=(checkpoints.tasks.recover, self._adoption.remove_leftovers),
            audit_retention_s=config.audit_retention_s,
            interval_s=config.checkpoint_sweep_interval_s,
            clock=wall_clock,
        )
        retrievals = Retrievals(wall_clock)
        self._retention = RetentionSweeper(
            runs.registry,
            base.ledger,
            base.store,
            runs.lease,
            retrievals,
            retrieved_s=config.result_retention_s,
            unretrieved_s=config.unretrieved_retention_s,
            clock=wall_clock,
        )
        step_metrics = StepMetrics()
        self._metrics_recorder = MetricsRecorder(step_metrics, self._scheduler)
        usage = LedgerUsage(base.ledger, config.worker_name, wall_clock=wall_clock)
        self._usage_reporter = UsageReporter(usage, base.budgets, self._scheduler)
        self._cycle, self._gaps = build_cycle(
            base, runs, checkpoints.registry, step_metrics, on_end=self._note_end
        )
        self._has_ledger = False
        self._add_services(OperationReader(base.ledger, retrievals), checkpoints)

    def _add_services(self, reader: OperationReader, checkpoints: CheckpointDomain) -> None:
        servicer = TrainerServicer(
            self._config, self._registry, reader, checkpoints.registry, self._catalog
        )
        self._server.add(trainer_pb2_grpc.add_TrainerServiceServicer_to_server, servicer)
        self._server.add(
            checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server,
            CheckpointServicer(self._registry, checkpoints),
        )
        self._server.add(
            trainer_control_pb2_grpc.add_TrainerControlServiceServicer_to_server,
            TrainerControlServicer(
                self._registry, self._adoption, self._lease, self._weight_exporter
            ),
        )
        self._server.add(
            operations_pb2_grpc.add_OperationsServicer_to_server,
            OperationsServicer(self._registry, reader, self._tasks),
        )

    async def _open(self) -> None:
        """Recover.

        Raises:
            ConfigError: If the database, the object store or the data folder cannot be used.
            StorageUnavailableError: If an accepted request is in the store, which is away.
        """
        await asyncio.to_thread(storage.probe_at_start, self._store)
        measure_disk(self._config.data_dir, DATA_FREE_BYTES, DATA_SIZE_BYTES)
        await self._ledger.open()
        self._has_ledger = True
        if self._ledger.is_shared:
            await self._lease.renew()
        else:
            await self._adoption.recover()
        await self._tasks.recover()
        self._sweeper.start()
        self._metrics_recorder.start()
        self._usage_reporter.start()
        self._cycle.start(
            self._gaps.watch(),
            self._lease.keep(),
            self._ledger.watch_lease(self._lease.look),
            self._retention.watch(),
            self._adoption.watch_idle(),
        )

    async def _close(self) -> None:
        """End the slice that is being computed, and park what is resident."""
        if not self._has_ledger:
            return
        self._has_ledger = False
        self._ledger.hurry(_STOP_PATIENCE_S)
        await self._sweeper.stop()
        await self._tasks.stop()
        await self._adoption.stop()
        await self._cycle.stop()
        await self._metrics_recorder.stop()
        await self._usage_reporter.stop()
        await self._retention.flush()
        await self._adoption.park_all()
        self._exports.close()
        if self._ledger.is_shared:
            failpoints.passing("trainer.leave")
            try:
                await self._ledger.leave()
            except TinsmithError as error:
                logger.warning(
                    "lease not given up; others wait for its end", extra={"problem": error.message}
                )
            failpoints.passing("trainer.left")
            if self._registration is not None:
                await self._registration.leave()
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

    async def export_live(self, run: str) -> WeightVersion:
        """Copy the newest weights of a run to an immutable version, for a sampler in this process.

        Raises:
            RunNotFoundError: If this trainer does not hold the run.
        """
        return await self._weight_exporter.export_live(await self._registry.get(run))

    def _describe(self) -> workers_pb2.Worker:
        return workers_pb2.Worker(
            models=self._catalog.select(""),
            max_runs=self._config.max_runs,
            incarnation=self._ledger.incarnation,
            ledger=self._ledger.identity,
        )
