"""The state of a run as a message: its queue, and what it waits for."""

from __future__ import annotations

from tinsmith.v1 import trainer_pb2
from tinsmith_trainer.ownership.run_registry import RunRegistry
from tinsmith_trainer.runs.run import LiveRun


def waiting_for(registry: RunRegistry, run: LiveRun) -> str:
    """Return what the next operation of a run waits for; empty if it runs or there is none."""
    return registry.status(run, min(run.queue)).waiting_for if run.queue else ""


def status_of(
    registry: RunRegistry, run: LiveRun, *, next_sequence_number: int
) -> trainer_pb2.RunStatus:
    """Return the state of a run, with its pending operations."""
    return trainer_pb2.RunStatus(
        run=run.name,
        version=run.record.version,
        next_sequence_number=next_sequence_number,
        num_pending_operations=len(run.queue),
        waiting_for=waiting_for(registry, run),
        resident=run.state.is_resident,
        replay_diverged=run.record.replay_diverged,
        pending_operations=[
            trainer_pb2.PendingOperation(sequence_number=number, kind=operation.record.kind)
            for number, operation in sorted(run.queue.items())
        ],
        latest_revision=run.queue.latest_revision,
    )
