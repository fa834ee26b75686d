"""Maps TrainerControlService, which pods alone may call, onto the runs of a trainer."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

from tinsmith import names
from tinsmith.v1 import trainer_control_pb2, trainer_control_pb2_grpc, trainer_pb2
from tinsmith_engine.contract.weight_codec import encode_index
from tinsmith_runtime.adapters import adapter_to_json
from tinsmith_runtime.errors import InvalidFieldError
from tinsmith_runtime.ledger import RunRecord
from tinsmith_runtime.records import ReleaseMode
from tinsmith_runtime.rpc.adapter_codec import decode_adapter
from tinsmith_runtime.rpc.pages import take_page
from tinsmith_runtime.rpc.requests import decode_history_retention, parse_name
from tinsmith_trainer.ownership.adoption import RunAdoption
from tinsmith_trainer.ownership.lease import Lease
from tinsmith_trainer.ownership.run_registry import RunRegistry
from tinsmith_trainer.residency.weight_exporter import WeightExporter
from tinsmith_trainer.residency.weight_exports import ExportedWeights
from tinsmith_trainer.rpc import training_codec
from tinsmith_trainer.rpc.run_status import status_of, waiting_for

_RELEASE_MODES = {
    trainer_control_pb2.ReleaseRunRequest.Mode.Value(f"MODE_{each.name}"): each
    for each in ReleaseMode
}

Context = Any


class TrainerControlServicer(trainer_control_pb2_grpc.TrainerControlServiceServicer):
    """Maps TrainerControlService onto the domain; only pods call its methods.

    Args:
        registry: Runs and their queues.
        adoption: Takes runs and gives them up.
        lease: Whether this process may answer for its runs.
        weight_exporter: Weights for samplers of other processes.
    """

    def __init__(
        self,
        registry: RunRegistry,
        adoption: RunAdoption,
        lease: Lease,
        weight_exporter: WeightExporter,
    ) -> None:
        self._registry = registry
        self._adoption = adoption
        self._lease = lease
        self._weight_exporter = weight_exporter

    async def AdoptRun(
        self, request: trainer_control_pb2.AdoptRunRequest, context: Context
    ) -> trainer_control_pb2.AdoptRunResponse:
        wanted = RunRecord(
            name=str(parse_name(names.RunName, request.run, "run")),
            base_model=request.base_model,
            adapter=adapter_to_json(decode_adapter(request.adapter)),
            epoch=request.epoch,
            history_retention_s=decode_history_retention(request),
        )
        version = await self._adoption.adopt(wanted)
        return trainer_control_pb2.AdoptRunResponse(version=version)

    async def SetHistoryRetention(
        self, request: trainer_control_pb2.SetHistoryRetentionRequest, context: Context
    ) -> trainer_control_pb2.SetHistoryRetentionResponse:
        if not request.HasField("history_retention"):
            raise InvalidFieldError("history_retention", "is required")
        await self._registry.set_history(
            str(parse_name(names.RunName, request.run, "run")),
            request.epoch,
            decode_history_retention(request),
        )
        return trainer_control_pb2.SetHistoryRetentionResponse()

    async def ForkRun(
        self, request: trainer_control_pb2.ForkRunRequest, context: Context
    ) -> trainer_control_pb2.ForkRunResponse:
        if request.source_step < 0:
            raise InvalidFieldError("source_step", f"must be at least 0, got {request.source_step}")
        rerun_from = await self._adoption.fork(
            str(parse_name(names.RunName, request.run, "run")),
            request.epoch,
            str(parse_name(names.RunName, request.source_run, "source_run")),
            request.source_step,
            reruns_step=request.reruns_step,
        )
        return trainer_control_pb2.ForkRunResponse(rerun_sequence_number=rerun_from)

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
        if request.destination == trainer_control_pb2.ExportWeightsRequest.DESTINATION_MEMORY:
            exported = await self._weight_exporter.export(run)
        else:
            exported = await self._weight_exporter.export_to_store(run)
        if isinstance(exported, ExportedWeights):
            return trainer_control_pb2.ExportWeightsResponse(
                version=exported.index.version, weights_id=exported.id
            )
        return trainer_control_pb2.ExportWeightsResponse(
            version=exported.manifest.attributes["version"],
            manifest_uri=exported.uri,
            manifest_sha256=exported.sha256,
        )

    async def ReadWeights(
        self, request: trainer_control_pb2.ReadWeightsRequest, context: Context
    ) -> AsyncIterator[trainer_control_pb2.ReadWeightsResponse]:
        run = await self._registry.find(str(parse_name(names.RunName, request.run, "run")))
        reading = await self._weight_exporter.exports.read(
            run.name,
            request.weights_id,
            offset=request.offset,
            held=request.held_weights_id,
            domain=request.memory_domain,
        )
        encoded = encode_index(reading.index)
        first = trainer_control_pb2.ReadWeightsResponse(
            index=encoded, index_sha256=hashlib.sha256(encoded).digest()
        )
        if reading.location is not None:
            first.shared_memory.pid = reading.location.pid
            first.shared_memory.descriptor = reading.location.descriptor
            first.shared_memory.inode = reading.location.inode
        yield first
        for offset, data in reading.chunks:
            yield trainer_control_pb2.ReadWeightsResponse(offset=offset, data=bytes(data))
