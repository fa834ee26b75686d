"""What the sampler needs of trainers, free of any transport."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Weights in the store.

    Attributes:
        version: Optimizer steps that made them.
        manifest_uri: Where their manifest is.
        manifest_sha256: Its hash; names the weights for good.
        is_published: Whether every project may sample from them; of a checkpoint alone.
    """

    version: int
    manifest_uri: str
    manifest_sha256: str
    is_published: bool = False


class Trainers(Protocol):
    """The trainers of a deployment."""

    async def publish(self, address: str, run: str) -> StoredWeights:
        """Return the newest weights of a run, written to the store if they are not there yet."""
        ...

    async def checkpoint(self, address: str, name: str) -> StoredWeights:
        """Return where the files of a checkpoint are."""
        ...
