"""What the coordinator keeps and is asked, as plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith.names import EpisodeName


class EpisodeState(enum.Enum):
    """Where an episode is in its life."""

    QUEUED = "queued"
    CLAIMED = "claimed"
    SUBMITTED = "submitted"
    DEAD = "dead"
    CANCELLED = "cancelled"

    @property
    def is_open(self) -> bool:
        """Whether it may still be played."""
        return self in OPEN_STATES


OPEN_STATES = (EpisodeState.QUEUED, EpisodeState.CLAIMED)


class EpisodeType(enum.Enum):
    """What an episode is for."""

    TRAIN = "train"
    EVAL = "eval"


class AttemptEnd(enum.Enum):
    """How an attempt at an episode ended."""

    ACTIVE = "active"
    SUBMITTED = "submitted"
    ABORTED = "aborted"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class EpisodeOutcome:
    """What an episode was worth.

    Attributes:
        reward: Of the whole episode; the sum of `step_rewards` where the agent gave only those.
        step_rewards: One for each model call, or none.
    """

    reward: float
    step_rewards: tuple[float, ...] = ()
    is_success: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    metadata_json: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEpisode:
    """An episode that is to be registered."""

    queue: str
    type: EpisodeType
    task_id: str
    task_json: str
    sampling_session: str
    model: str
    max_attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One play of a task.

    Attributes:
        serial: Orders episodes by their registration.
        lease_expire_s: When the lease runs out, by the clock of the database; None without one.
        revision: Orders the ends of the episodes of a project; 0 before.
        trajectory_bytes: What the model calls of the current attempt take.
    """

    serial: int
    project: str
    episode_id: str
    queue: str
    type: EpisodeType
    state: EpisodeState
    task_id: str
    task_json: str
    sampling_session: str
    model: str
    num_attempts: int
    max_attempts: int
    client_id: str
    lease_expire_s: float | None
    lease_duration_s: float
    outcome: EpisodeOutcome | None
    failures: tuple[str, ...]
    num_model_calls: int
    trajectory_bytes: int
    revision: int
    create_time_s: float
    end_time_s: float | None

    @property
    def name(self) -> EpisodeName:
        """Resource name."""
        return EpisodeName(self.project, self.episode_id)

    @property
    def queue_key(self) -> QueueKey:
        """What it waits in."""
        return QueueKey(self.project, self.queue, self.type)


@dataclass(frozen=True, slots=True)
class QueueKey:
    """What a claim takes from."""

    project: str
    queue: str
    type: EpisodeType


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A wish for an episode.

    Attributes:
        max_held: Episodes that the client may hold, this one included; 0 for no limit.
    """

    key: QueueKey
    client_id: str
    lease_duration_s: float
    timeout_s: float
    max_held: int


@dataclass(frozen=True, slots=True)
class Lease:
    """An episode in the hands of an agent, with the secrets that prove it."""

    episode: Episode
    token: str = field(repr=False)
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class NoEpisode:
    """Why a claim got nothing.

    Attributes:
        is_throttled: Whether the client holds too many, whatever waits.
        is_final: Whether asking again with the same request id is of no use.
    """

    waiting_for: str
    is_throttled: bool = False
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class NewCall:
    """A model call to be recorded.

    Attributes:
        num_sequences: Samples that it made.
        content: The call as the codec wrote it.
    """

    request_id: str
    digest: bytes
    num_sequences: int
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class StoredCall:
    """A model call that was recorded.

    Attributes:
        first_index: Of its samples among those of the attempt.
    """

    first_index: int
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class EpisodePage:
    """A part of a list.

    Attributes:
        next_serial: Where the next part begins; None at the end.
    """

    episodes: list[Episode]
    next_serial: int | None
