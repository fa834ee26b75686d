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
    max_open_matches: int = 1000
    """Matches of one project that have not ended."""
    max_trajectory_bytes: int = 8 * 2**20
    """Recorded prompts and samples of one attempt at an episode."""
    max_open_rollouts: int = 100
    """Batches of rollouts of one project that have not ended."""
    max_rollout_episodes: int = 20_000
    """Episodes that these may have, over-sampled ones with them."""
    max_rollout_tokens: int = 2**27
    """Tokens that these episodes may sample, each at most."""
    max_playing_episodes: int = 512
    """Episodes of rollouts that are played at once, of all projects."""
    max_playing_episodes_of_project: int = 256
    """Those of one project."""
    max_rollout_trajectory_bytes: int = 8 * 2**20
    """Trajectory of one episode of a rollout; a larger one counts as a failed play."""
    max_rollout_bytes: int = 2**30
    """Trajectories of one batch, and of all results of a project; the oldest are removed first."""
    rollout_retention_s: float = _DAY_S
    """How long rollouts are kept after the end of their batch; a day at least."""
    retention_s: float = 7 * _DAY_S
    """How long an episode or a match is kept after its end; a day at least."""
    sweep_interval_s: float = 1.0
    """Longest pause between two looks for time limits that ran out."""

    def __post_init__(self) -> None:
        require_positive(
            self,
            "max_open_episodes",
            "max_open_matches",
            "max_trajectory_bytes",
            "max_open_rollouts",
            "max_rollout_episodes",
            "max_rollout_tokens",
            "max_playing_episodes",
            "max_playing_episodes_of_project",
            "max_rollout_trajectory_bytes",
            "max_rollout_bytes",
            "rollout_retention_s",
            "retention_s",
            "sweep_interval_s",
        )
        for name in ("retention_s", "rollout_retention_s"):
            if getattr(self, name) < _DAY_S:
                raise ConfigError(f"{name} must be a day at least: requests are repeated that long")
        room = self.max_message_bytes - _RESERVED_MESSAGE_BYTES
        if self.max_trajectory_bytes * _ANSWER_GROWTH > room:
            raise ConfigError(
                f"max_trajectory_bytes must be at most {room // _ANSWER_GROWTH}, or an episode "
                "does not fit into a message of max_message_bytes"
            )
        if self.max_rollout_trajectory_bytes > room:
            raise ConfigError(
                f"max_rollout_trajectory_bytes must be at most {room}, or an episode does not fit "
                "into a message of max_message_bytes"
            )
        self.server()
