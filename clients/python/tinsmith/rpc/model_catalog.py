"""Listing and deleting what a project has. Coroutines that run in the background loop."""

from __future__ import annotations

from tinsmith.rpc import codec
from tinsmith.rpc.core import ClientCore
from tinsmith.rpc.transport import Endpoint
from tinsmith.types import Checkpoint, RunInfo, ServedModel
from tinsmith.v1 import scheduler_pb2, trainer_pb2

_PAGE_SIZE = 1000
_ACTIVE = scheduler_pb2.TrainingRun.STATE_ACTIVE
_MOVING = scheduler_pb2.TrainingRun.STATE_MOVING


async def list_models(core: ClientCore) -> list[ServedModel]:
    """Return the base models that are served."""
    request = scheduler_pb2.GetCapabilitiesRequest(parent=core.project)
    answer = await core.transport.call(
        core.scheduler, lambda c: c.scheduler.GetCapabilities, request
    )
    return [codec.decode_served_model(model) for model in answer.models]


async def list_runs(core: ClientCore) -> list[RunInfo]:
    """Return the runs of the project, newest first."""
    return [codec.decode_run(message, is_listed=True) for message in await _all_runs(core)]


async def delete_run(core: ClientCore, name: str) -> None:
    """Delete a run."""
    request = scheduler_pb2.DeleteTrainingRunRequest(name=core.run_name(name))
    await core.transport.call(core.scheduler, lambda c: c.scheduler.DeleteTrainingRun, request)


async def list_checkpoints(core: ClientCore, run: str | None) -> list[Checkpoint]:
    """Return the checkpoints of a run, or of all runs, newest first.

    Of all runs, those are left out whose trainers are gone and left nobody who knows them.
    """
    if run is not None:
        message = await core.get_run(core.run_name(run))
        return await _checkpoints_at(core, core.checkpoints_endpoint(message), message.name)
    endpoints: dict[str, Endpoint] = {}
    for message in await _all_runs(core):
        is_known = message.checkpoint_address or message.state == _ACTIVE
        if is_known and message.state in (_ACTIVE, _MOVING):
            endpoint = core.checkpoints_endpoint(message)
            endpoints[endpoint.address] = endpoint
    found: dict[str, Checkpoint] = {}
    for endpoint in endpoints.values():
        for checkpoint in await _checkpoints_at(core, endpoint, f"{core.project}/trainingRuns/-"):
            found[checkpoint.name] = checkpoint
    return sorted(found.values(), key=_created_at, reverse=True)


async def _all_runs(core: ClientCore) -> list[scheduler_pb2.TrainingRun]:
    runs: list[scheduler_pb2.TrainingRun] = []
    token = ""
    while True:
        request = scheduler_pb2.ListTrainingRunsRequest(
            parent=core.project, page_size=_PAGE_SIZE, page_token=token
        )
        answer = await core.transport.call(
            core.scheduler, lambda c: c.scheduler.ListTrainingRuns, request
        )
        runs.extend(answer.training_runs)
        token = answer.next_page_token
        if not token:
            return runs


async def _checkpoints_at(core: ClientCore, endpoint: Endpoint, parent: str) -> list[Checkpoint]:
    found: list[Checkpoint] = []
    token = ""
    while True:
        request = trainer_pb2.ListCheckpointsRequest(
            parent=parent, page_size=_PAGE_SIZE, page_token=token
        )
        answer = await core.transport.call(endpoint, lambda c: c.trainer.ListCheckpoints, request)
        found.extend(codec.decode_checkpoint(message) for message in answer.checkpoints)
        token = answer.next_page_token
        if not token:
            return found


def _created_at(checkpoint: Checkpoint) -> float:
    return checkpoint.create_time.timestamp() if checkpoint.create_time else 0.0
