"""What plays episodes for a project, as the driver of batches sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from tinsmith.rollouts import Play, PlayFailure
from tinsmith_coordinator.store.rollout_records import NewBatch


@dataclass(frozen=True, slots=True)
class Played:
    """How a play ended.

    Attributes:
        content: The trajectory as the codec wrote it; empty where nothing is known of it.
        num_tokens: Sampled tokens.
    """

    content: bytes = field(default=b"", repr=False)
    num_tokens: int = 0
    failure: PlayFailure | None = None


class EpisodePlayer(Protocol):
    """Plays the episodes of one batch."""

    async def play(self, play: Play) -> Played:
        """Play one episode; a cancelled call releases what it holds.

        Raises:
            TinsmithError: What every play of the batch would meet.
        """
        ...


class Players(Protocol):
    """Plays for any project."""

    async def check(self, project: str, new: NewBatch) -> None:
        """Refuse a batch that no play could begin.

        Raises:
            SamplingSessionNotFoundError: If the project has no such session.
            EnvironmentNotFoundError: If the environment is not served.
            TinsmithError: If that cannot be found out.
        """
        ...

    async def open(self, project: str, content: bytes) -> EpisodePlayer:
        """Return what plays a batch, given by its request.

        Raises:
            TinsmithError: If its sampler or tokenizer cannot be had.
        """
        ...

    async def close(self) -> None:
        """Give back what is held; what plays still is cut off."""
        ...
