"""Batches of rollouts and their episodes, as plain values."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tinsmith.names import RolloutBatchName
from tinsmith.rollouts import GroupConfig, GroupReport, Play
from tinsmith_runtime.errors import TinsmithError


class BatchState(enum.Enum):
    """Where a batch is in its life."""

    PLAYING = "playing"
    COMPLETED = "completed"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A batch that is to be played.

    Attributes:
        content: The request, as the codec reads it again.
        sampling_session: Resource name of what plays.
        environment: Resource name of what is played.
        num_tokens: Most tokens that its episodes may sample, over-sampled ones with them.
    """

    content: bytes = field(repr=False)
    sampling_session: str
    environment: str
    num_tasks: int
    groups: GroupConfig
    num_tokens: int
    timeout_s: float

    @property
    def num_episodes(self) -> int:
        """Most episodes that are begun, failures apart."""
        return self.num_tasks * self.groups.num_begun_members


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups of episodes that are played, or were.

    Attributes:
        key_id: The key that asked for it, by whose rights it is played.
        taken: Members of each complete group, by task.
        failure: Why it failed.
        num_bytes: What its episodes take.
        revision: Counts the plays that ended; one more when the batch has.
        deadline_s: When it is ended at the latest, by the clock of the database.
    """

    serial: int
    project: str
    batch_id: str
    key_id: str
    num_tasks: int
    groups: GroupConfig
    state: BatchState
    report: GroupReport
    taken: Mapping[int, tuple[int, ...]]
    failure: TinsmithError | None
    num_bytes: int
    revision: int
    deadline_s: float
    create_time_s: float
    end_time_s: float | None

    @property
    def name(self) -> RolloutBatchName:
        """Resource name."""
        return RolloutBatchName(self.project, self.batch_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedPlay:
    """A play that ended.

    Attributes:
        reason: Why it failed, in one word; empty if it finished.
        content: The trajectory as the codec wrote it; of one that failed it may be empty.
        revision: Orders the ends within a batch.
    """

    play: Play
    reason: str = ""
    problem: str = ""
    may_repeat: bool = True
    content: bytes = field(default=b"", repr=False)
    revision: int = 0

    @property
    def has_finished(self) -> bool:
        """Whether the episode was played to its end."""
        return not self.reason


@dataclass(frozen=True, slots=True)
class BatchUpdate:
    """What ended in a batch since a revision.

    Attributes:
        revision: Up to which `ended` is whole.
    """

    batch: Batch
    ended: tuple[EndedPlay, ...]
    revision: int
