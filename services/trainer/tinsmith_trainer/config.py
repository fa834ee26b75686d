"""Settings of the trainer pod."""

from __future__ import annotations

from dataclasses import dataclass, field

from tinsmith_runtime.config import require_positive
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.pod.engine_settings import EngineConfig
from tinsmith_runtime.pod.settings import DatabaseConfig, WorkerConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerConfig(WorkerConfig, EngineConfig, DatabaseConfig):
    """Settings of one trainer."""

    database_url: str = field(default="", repr=False)
    """`postgresql://...` of a ledger that trainers share; runs then move between them."""
    storage_uri: str = ""
    """Where snapshots and checkpoints go; `{data_dir}/store` by default."""
    worker_name: str = "trainer-0"
    shard_base: bool = False
    """Under torchrun: whether each rank keeps a part of the base models, for bases that are larger
    than a device. Full-parameter runs are spread over the ranks in any case."""
    rank_timeout_s: float = 300.0
    """Under torchrun: how long a rank waits for another one before all of them end."""
    max_resident_runs: int = 64
    """Runs in memory at once; idle ones are parked."""
    max_parked_bytes: int = 2**31
    """Host memory for the states of parked runs; 0 leaves them to the disk."""
    max_runs: int = 1024
    """Runs in all."""
    max_batch_tokens: int = 262_144
    """Tokens of one batch."""
    max_batch_datums: int = 4096
    """Datums of one batch."""
    cycle_tokens: int = 16_384
    """About how many tokens one cycle computes: more packs better, less makes others wait less."""
    max_queued_operations: int = 1024
    """Operations of one run that wait; more are refused before they are accepted."""
    max_project_queued_operations: int = 8192
    """Operations of all runs of one project that wait."""
    max_queued_tokens: int = 2**22
    """Tokens of one run that wait."""
    max_project_queued_tokens: int = 2**24
    """Tokens of all runs of one project that wait."""
    max_queued_bytes: int = 2**30
    """Requests that wait in memory, over all runs."""
    max_project_queued_bytes: int = 2**28
    """Requests of one project that wait in memory."""
    result_retention_s: float = 24 * 3600.0
    """How long a result is kept after a client first got it."""
    unretrieved_retention_s: float = 7 * 24 * 3600.0
    """How long a result is kept after its operation ended, if no client got it."""
    lease_ttl_s: float = 15.0
    """On a shared ledger: how long other trainers leave a silent one its runs."""
    gap_timeout_s: float = 60.0
    """How long operations wait for a sequence number that has not arrived."""
    max_attempts: int = 3
    """Deaths of the process after which the operation that was running is failed."""
    max_import_bytes: int = 2**32
    """Weights of one adapter that a client may upload."""
    max_project_upload_bytes: int = 2**32 + 2**20
    """What all uploads of a project that are under way may come to; one of `max_import_bytes` and
    its settings may always be."""
    max_project_checkpoints: int = 65_536
    """Checkpoints of a project."""
    max_project_exports: int = 4096
    """Exports of a project."""
    export_shard_bytes: int = 2**31
    """Size at which another file of an exported model is begun; so much memory an export takes."""
    checkpoint_sweep_interval_s: float = 60.0
    """How often expired checkpoints and exports are removed."""
    audit_retention_s: float = 400 * 24 * 3600.0
    """How long the events of checkpoints are kept."""
    max_exported_bytes: int = 2**32
    """Host memory for copies of weights that samplers of other processes read; larger weights go by
    the object store."""
    snapshot_replay_s: float = 30.0
    """Takes a snapshot once a replay from the last one would take this long."""
    history_snapshots: int = 4
    """How many older snapshots of a run are kept of the last 25 h, about, so that its past can be
    forked; at least 1. Of a longer past as many are kept each time that the age doubles."""

    def __post_init__(self) -> None:
        self.check_engine()
        require_positive(
            self,
            "max_resident_runs",
            "max_runs",
            "max_batch_tokens",
            "max_batch_datums",
            "cycle_tokens",
            "max_queued_operations",
            "max_project_queued_operations",
            "max_queued_tokens",
            "max_project_queued_tokens",
            "max_queued_bytes",
            "max_project_queued_bytes",
            "result_retention_s",
            "unretrieved_retention_s",
            "lease_ttl_s",
            "gap_timeout_s",
            "max_attempts",
            "max_exported_bytes",
            "snapshot_replay_s",
            "history_snapshots",
            "rank_timeout_s",
            "max_import_bytes",
            "max_project_upload_bytes",
            "max_project_checkpoints",
            "max_project_exports",
            "export_shard_bytes",
            "checkpoint_sweep_interval_s",
            "audit_retention_s",
        )
        for name in ("max_queued_tokens", "max_project_queued_tokens"):
            if getattr(self, name) < self.max_batch_tokens:
                raise ConfigError(
                    f"{name} must be at least max_batch_tokens, {self.max_batch_tokens}, or the "
                    "largest batch could never wait"
                )
        self.server()

    def storage(self) -> str:
        """Return the URI of the object store."""
        return self.storage_uri or f"file://{(self.data_dir / 'store').resolve()}"
