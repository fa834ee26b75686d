"""The calls that the scheduler makes to trainers, as a protocol free of transport."""

from __future__ import annotations

from typing import Protocol

from tinsmith_runtime.adapters import AdapterConfig
from tinsmith_runtime.records import ReleaseMode
from tinsmith_scheduler.store.records import CheckpointInfo, RunStanding


class Trainers(Protocol):
    """Calls to trainers.

    All raise what the trainer answered as a plain `TinsmithError`, to be told apart by `code` and
    `reason`. A trainer that does not answer is `WorkerUnavailableError`.
    """

    async def adopt_run(
        self,
        address: str,
        *,
        run: str,
        epoch: int,
        base_model: str,
        adapter: AdapterConfig,
        history_retention_s: float,
    ) -> None:
        """Have a trainer take over a run."""
        ...

    async def set_history(
        self, address: str, *, run: str, epoch: int, history_retention_s: float
    ) -> None:
        """Have a trainer on the ledger of a run keep its past for so long."""
        ...

    async def fork_run(
        self,
        address: str,
        *,
        run: str,
        epoch: int,
        source_run: str,
        source_step: int,
        reruns_step: bool,
    ) -> int:
        """Have a new run become the copy of another; return the first operation it executes anew.

        Repeating it changes nothing.
        """
        ...

    async def release_run(self, address: str, *, run: str, epoch: int, mode: ReleaseMode) -> None:
        """Have a trainer give up a run."""
        ...

    async def resume_run(self, address: str, *, run: str) -> bytes:
        """Let a new client go on with a run; return where it stands, encoded."""
        ...

    async def list_standings(
        self, address: str, project: str, *, timeout_s: float
    ) -> list[RunStanding]:
        """Return how the runs of a project stand that have operations under way on a trainer."""
        ...

    async def get_checkpoint(self, address: str, checkpoint: str) -> CheckpointInfo:
        """Return what a trainer knows of a checkpoint, of whatever project."""
        ...

    async def load_checkpoint(
        self, address: str, *, run: str, checkpoint: str, include_optimizer: bool
    ) -> None:
        """Have a new run load a checkpoint as its operation 1; return once it did.

        Repeating it changes nothing. What the operation failed with is raised.
        """
        ...
