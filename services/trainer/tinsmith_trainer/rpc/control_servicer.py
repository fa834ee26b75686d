"""Maps TrainerControlService, which pods alone may call, onto the runs of a trainer."""

from __future__ import annotations

from typing import Any

from tinsmith import names
from tinsmith.v1 import trainer_control_pb2, trainer_control_pb2_grpc, trainer_pb2
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.records import ReleaseMode
from tinsmith_runtime.rpc.adapter_codec import decode_adapter
from tinsmith_runtime.rpc.pages import take_page
from tinsmith_runtime.rpc.requests import parse_name
from tinsmith_trainer.ownership.adoption import RunAdoption
from tinsmith_trainer.ownership.lease import Lease
from tinsmith_trainer.ownership.run_registry import RunRegistry
from tinsmith_trainer.residency.weight_publisher import Publisher
from tinsmith_trainer.rpc import training_codec
from tinsmith_trainer.rpc.run_status import status_of, waiting_for

_RELEASE_MODES = {
    trainer_control_pb2.ReleaseRunRequest.MODE_PARK: ReleaseMode.PARK,
    trainer_control_pb2.ReleaseRunRequest.MODE_HAND_OVER: ReleaseMode.HAND_OVER,
    trainer_control_pb2.ReleaseRunRequest.MODE_DELETE: ReleaseMode.DELETE,
}

Context = Any


class TrainerControlServicer(trainer_control_pb2_grpc.TrainerControlServiceServicer):
    """Maps TrainerControlService onto the domain; only pods call its methods.

    Args:
        registry: Runs and their queues.
        adoption: Takes runs and gives them up.
        lease: Whether this process may answer for its runs.
        publisher: Weights for samplers of other processes.
    """

    def __init__(
        self,
        registry: RunRegistry,
        adoption: RunAdoption,
        lease: Lease,
        publisher: Publisher,
    ) -> None:
        self._registry = registry
        self._adoption = adoption
        self._lease = lease
        self._publisher = publisher

    async def AdoptRun(
        self, request: trainer_control_pb2.AdoptRunRequest, context: Context
    ) -> trainer_control_pb2.AdoptRunResponse:
        name = parse_name(names.RunName, request.run, "run")
        version = await self._adoption.adopt(
            str(name),
            request.base_model,
            decode_adapter(request.adapter),
            request.epoch,
        )
        return trainer_control_pb2.AdoptRunResponse(version=version)

    async def ReleaseRun(
        self, request: trainer_control_pb2.ReleaseRunRequest, context: Context
    ) -> trainer_control_pb2.ReleaseRunResponse:
        if request.mode not in _RELEASE_MODES:
            raise InvalidFieldError("mode", "must be MODE_PARK, MODE_HAND_OVER or MODE_DELETE")
        await self._adoption.release(
            str(parse_name(names.RunName, request.run, "run")),
            request.epoch,
            _RELEASE_MODES[request.mode],
        )
        return trainer_control_pb2.ReleaseRunResponse()

    async def ListRunStatuses(
        self, request: trainer_control_pb2.ListRunStatusesRequest, context: Context
    ) -> trainer_control_pb2.ListRunStatusesResponse:
        project = training_codec.decode_all_runs(request.parent).project
        told = [
            run
            for run in self._registry.runs
            if (run.queue or run.record.replay_diverged) and run.name.split("/")[1] == project
        ]
        page, token = take_page(f"{request.parent}/statuses", told, lambda run: run.name, request)
        return trainer_control_pb2.ListRunStatusesResponse(
            statuses=[
                trainer_pb2.RunStatus(
                    run=run.name,
                    version=run.record.version,
                    num_pending_operations=len(run.queue),
                    waiting_for=waiting_for(self._registry, run),
                    resident=run.state.is_resident,
                    replay_diverged=run.record.replay_diverged,
                )
                for run in page
            ],
            next_page_token=token,
        )

    async def ResumeRun(
        self, request: trainer_control_pb2.ResumeRunRequest, context: Context
    ) -> trainer_pb2.RunStatus:
        run = await self._registry.find(str(parse_name(names.RunName, request.run, "run")))
        self._lease.require()
        await self._registry.resume(run)
        return status_of(self._registry, run, next_sequence_number=run.queue.highest_number + 1)

    async def ExportWeights(
        self, request: trainer_control_pb2.ExportWeightsRequest, context: Context
    ) -> trainer_control_pb2.ExportWeightsResponse:
        run = await self._registry.find(str(parse_name(names.RunName, request.run, "run")))
        self._lease.require()
        written = await self._publisher.publish(run)
        return trainer_control_pb2.ExportWeightsResponse(
            version=written.manifest.attributes["version"],
            manifest_uri=written.uri,
            manifest_sha256=written.sha256,
        )
