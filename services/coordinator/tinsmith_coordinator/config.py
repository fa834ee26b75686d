"""Settings of the coordinator pod."""

from __future__ import annotations

from dataclasses import dataclass

from tinsmith_runtime.config import require_positive
from tinsmith_runtime.errors import ConfigError
from tinsmith_runtime.pod.settings import DatabaseConfig, WorkerConfig

# A token that was only read takes 4 bytes in a recorded prompt and 24 in a trajectory.
_ANSWER_GROWTH = 6
_RESERVED_MESSAGE_BYTES = 2 * 2**20
_DAY_S = 86_400.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CoordinatorConfig(WorkerConfig, DatabaseConfig):
    """Settings of one coordinator."""

    worker_name: str = "coordinator-0"
    max_open_episodes: int = 10_000
    """Episodes of one project that have not ended."""
    max_trajectory_bytes: int = 8 * 2**20
    """Recorded prompts and samples of one attempt at an episode."""
    retention_s: float = 7 * _DAY_S
    """How long an episode is kept after its end; a day at least."""
    sweep_interval_s: float = 1.0
    """Longest pause between two looks for leases that ran out."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "max_open_episodes",
            "max_trajectory_bytes",
            "retention_s",
            "sweep_interval_s",
        )
        if self.retention_s < _DAY_S:
            raise ConfigError("retention_s must be a day at least: requests are repeated that long")
        room = self.max_message_bytes - _RESERVED_MESSAGE_BYTES
        if self.max_trajectory_bytes * _ANSWER_GROWTH > room:
            raise ConfigError(
                f"max_trajectory_bytes must be at most {room // _ANSWER_GROWTH}, or an episode "
                "does not fit into a message of max_message_bytes"
            )
        self.server()
