"""What a sampling session samples from, as the scheduler knows it, for a few seconds at a time."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

_MAX_ENTRIES = 10_000


@dataclass(frozen=True, slots=True)
class Target:
    """What a sampling session samples from: at most one of `checkpoint` and `run` is set.

    Attributes:
        base_model: Name of the base model.
        checkpoint: Resource name; empty for none.
        run: Resource name of a live run; empty for none.
        trainer_address: Where the trainer of the checkpoint or run is.
        project: Id of the project that samples.
        stop_tokens: What ends an answer by the run's own chat template.
    """

    base_model: str
    checkpoint: str
    run: str
    trainer_address: str
    project: str
    stop_tokens: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        """Name of what is sampled from."""
        return self.checkpoint or self.run or self.base_model


class SessionCache:
    """Sampling sessions by name.

    Args:
        look_up: Asks the scheduler; raises `SamplingSessionNotFoundError`.
        ttl_s: How long an answer is used, and so how long an ended session still works.
    """

    def __init__(self, look_up: Callable[[str], Awaitable[Target]], *, ttl_s: float) -> None:
        self._look_up = look_up
        self._ttl_s = ttl_s
        self._targets: dict[str, tuple[float, Target]] = {}

    async def get(self, name: str) -> Target:
        """Return what a session samples from.

        Raises:
            SamplingSessionNotFoundError: If there is no such session.
            WorkerUnavailableError: If the scheduler cannot be reached and no answer is at hand.
        """
        known = self._targets.get(name)
        if known is not None and known[0] > time.monotonic():
            return known[1]
        if len(self._targets) >= _MAX_ENTRIES:
            self._targets.clear()
        target = await self._look_up(name)
        self._targets[name] = (time.monotonic() + self._ttl_s, target)
        return target

    def forget(self, name: str) -> None:
        """Ask the scheduler again next time, as when a trainer has moved."""
        self._targets.pop(name, None)
