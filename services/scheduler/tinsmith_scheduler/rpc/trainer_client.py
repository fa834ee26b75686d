"""The scheduler's calls to trainers, over gRPC with the pod key."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio
from google.longrunning import operations_pb2, operations_pb2_grpc

from tinsmith.rpc.durations import encode_duration
from tinsmith.rpc.error_codec import decode_status
from tinsmith.rpc.lists import pages
from tinsmith.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    trainer_control_pb2,
    trainer_control_pb2_grpc,
    trainer_pb2,
    trainer_pb2_grpc,
)
from tinsmith_runtime.adapters import AdapterConfig
from tinsmith_runtime.records import ReleaseMode
from tinsmith_runtime.rpc.adapter_codec import decode_adapter, encode_adapter
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_runtime.rpc.scheduler_client import typed_errors
from tinsmith_scheduler.store.records import CheckpointInfo, RunStanding

_FORK_TIMEOUT_S = 300.0
"""The trainer copies files; a call that was cut off goes on there, and is repeated."""
_LOAD_IDS = uuid.UUID("8f1c2f0e-5f0b-4c53-9a0e-2b6f3f8f8a51")
_MODES = {
    each: trainer_control_pb2.ReleaseRunRequest.Mode.Value(f"MODE_{each.name}")
    for each in ReleaseMode
}

_CONTROL = trainer_control_pb2_grpc.TrainerControlServiceStub


class GrpcTrainers:
    """Implements `Trainers`; keeps one channel for each address.

    Args:
        credentials: Of the scheduler.
        timeout_s: Deadline of each call.
    """

    def __init__(self, credentials: PodCredentials, *, timeout_s: float) -> None:
        self._credentials = credentials
        self._metadata = credentials.metadata
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

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
        request = trainer_control_pb2.AdoptRunRequest(
            run=run,
            epoch=epoch,
            base_model=base_model,
            adapter=encode_adapter(adapter),
            history_retention=encode_duration(history_retention_s),
        )
        await self._call(address, "AdoptRun", request, _CONTROL)

    async def set_history(
        self, address: str, *, run: str, epoch: int, history_retention_s: float
    ) -> None:
        """Have a trainer on the ledger of a run keep its past for so long."""
        request = trainer_control_pb2.SetHistoryRetentionRequest(
            run=run, epoch=epoch, history_retention=encode_duration(history_retention_s)
        )
        await self._call(address, "SetHistoryRetention", request, _CONTROL)

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
        """Have a new run become the copy of another; see `Trainers`."""
        request = trainer_control_pb2.ForkRunRequest(
            run=run,
            epoch=epoch,
            source_run=source_run,
            source_step=source_step,
            reruns_step=reruns_step,
        )
        answer: trainer_control_pb2.ForkRunResponse = await self._call(
            address, "ForkRun", request, _CONTROL, timeout_s=_FORK_TIMEOUT_S
        )
        return answer.rerun_sequence_number

    async def release_run(self, address: str, *, run: str, epoch: int, mode: ReleaseMode) -> None:
        """Have a trainer give up a run."""
        request = trainer_control_pb2.ReleaseRunRequest(run=run, epoch=epoch, mode=_MODES[mode])
        await self._call(address, "ReleaseRun", request, _CONTROL)

    async def resume_run(self, address: str, *, run: str) -> bytes:
        """Let a new client go on with a run; return where it stands, encoded."""
        request = trainer_control_pb2.ResumeRunRequest(run=run)
        answer: trainer_pb2.RunStatus = await self._call(address, "ResumeRun", request, _CONTROL)
        return answer.SerializeToString()

    async def list_standings(
        self, address: str, project: str, *, timeout_s: float
    ) -> list[RunStanding]:
        """Return how the runs of a project stand that have operations or a diverged replay."""
        request = trainer_control_pb2.ListRunStatusesRequest(
            parent=f"projects/{project}/trainingRuns/-"
        )
        deadline_s = time.monotonic() + timeout_s

        def send(request: Any) -> Awaitable[trainer_control_pb2.ListRunStatusesResponse]:
            # A deadline that has passed is a call's deadline too: the error keeps its type.
            remaining_s = max(deadline_s - time.monotonic(), 1e-3)
            return self._call(address, "ListRunStatuses", request, _CONTROL, timeout_s=remaining_s)

        return [
            RunStanding(
                each.run, each.num_pending_operations, each.waiting_for, each.replay_diverged
            )
            async for page in pages(send, request)
            for each in page.statuses
        ]

    async def get_checkpoint(self, address: str, checkpoint: str) -> CheckpointInfo:
        """Return what a trainer knows of a checkpoint."""
        request = checkpoint_pb2.GetCheckpointRequest(name=checkpoint)
        answer: checkpoint_pb2.Checkpoint = await self._call(
            address, "GetCheckpoint", request, checkpoint_pb2_grpc.CheckpointServiceStub
        )
        return CheckpointInfo(
            base_model=answer.base_model,
            adapter=decode_adapter(answer.adapter),
            has_optimizer=answer.kind == checkpoint_pb2.Checkpoint.KIND_TRAINING,
            is_published=answer.state == checkpoint_pb2.Checkpoint.STATE_PUBLISHED,
        )

    async def load_checkpoint(
        self, address: str, *, run: str, checkpoint: str, include_optimizer: bool
    ) -> None:
        """Have a new run load a checkpoint; see `Trainers`."""
        request = trainer_pb2.LoadCheckpointRequest(
            run=run,
            # The same for each attempt, also after a restart of the scheduler.
            request_id=str(uuid.uuid5(_LOAD_IDS, run)),
            sequence_number=1,
            checkpoint=checkpoint,
            include_optimizer=include_optimizer,
        )
        operation: operations_pb2.Operation = await self._call(address, "LoadCheckpoint", request)
        wait = operations_pb2.WaitOperationRequest(
            name=operation.name, timeout=encode_duration(self._timeout_s / 2)
        )
        while not operation.done:
            operation = await self._call(
                address, "WaitOperation", wait, operations_pb2_grpc.OperationsStub
            )
        if operation.HasField("error"):
            raise decode_status(operation.error)

    async def _call(
        self,
        address: str,
        method: str,
        request: object,
        stubs: Callable[[grpc.aio.Channel], Any] = trainer_pb2_grpc.TrainerServiceStub,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._credentials.open_channel(
                address, PodRole.TRAINER
            )
        stub = stubs(channel)
        async with typed_errors("trainer", may_move=True):
            return await getattr(stub, method)(
                request, timeout=timeout_s or self._timeout_s, metadata=self._metadata
            )
