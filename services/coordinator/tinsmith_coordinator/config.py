"""Settings of the coordinator pod."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.rpc.server import ServerConfig

# A token that was only read takes 4 bytes in a recorded prompt and 24 in a trajectory.
_ANSWER_GROWTH = 6
_RESERVED_MESSAGE_BYTES = 2 * 2**20
_DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig:
    """Settings of one coordinator."""

    data_dir: Path
    """Folder of the database, unless that is elsewhere."""
    database_url: str = field(default="", repr=False)
    """`postgresql://...`; a second coordinator on it stands by until the first has ended."""
    worker_name: str = "coordinator-0"
    """Identity at the scheduler; must be the same after a restart."""
    pool: str = ""
    """The scheduler sends only callers here whose key is bound to it; empty is for all others."""
    scheduler_address: str = ""
    """`host:port` of the scheduler."""
    pod_key: str = field(default="", repr=False)
    """The secret that the pods of one deployment share."""
    listen_address: str = "127.0.0.1:0"
    metrics_address: str | None = None
    drain_timeout_s: float = 30.0
    max_message_bytes: int = 64 * 2**20
    max_open_episodes: int = 10_000
    """Episodes of one project that have not ended."""
    max_trajectory_bytes: int = 8 * 2**20
    """Recorded prompts and samples of one attempt at an episode."""
    retention_s: float = 7 * _DAY_S
    """How long an episode is kept after its end; a day at least."""
    sweep_interval_s: float = 1.0
    """Longest pause between two looks for leases that ran out."""

    def __post_init__(self) -> None:
        for name in (
            "max_open_episodes",
            "max_trajectory_bytes",
            "retention_s",
            "sweep_interval_s",
        ):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ConfigError(f"{name} must be positive, got {value}")
        if self.retention_s < _DAY_S:
            raise ConfigError("retention_s must be a day at least: requests are repeated that long")
        room = self.max_message_bytes - _RESERVED_MESSAGE_BYTES
        if self.max_trajectory_bytes * _ANSWER_GROWTH > room:
            raise ConfigError(
                f"max_trajectory_bytes must be at most {room // _ANSWER_GROWTH}, or an episode "
                "does not fit into a message of max_message_bytes"
            )
        self.server()

    def server(self) -> ServerConfig:
        """Return the settings of the gRPC server."""
        return ServerConfig(
            listen_address=self.listen_address,
            metrics_address=self.metrics_address,
            drain_timeout_s=self.drain_timeout_s,
            max_message_bytes=self.max_message_bytes,
        )
