"""The scheduler's calls to trainers, over gRPC with the pod key."""

from __future__ import annotations

from typing import Any

import grpc.aio

from tinsmith.v1 import trainer_pb2, trainer_pb2_grpc
from tinsmith_runtime.scheduler_client import open_channel, pod_metadata, typed_errors
from tinsmith_scheduler.codec import encode_adapter
from tinsmith_scheduler.records import Adapter, ReleaseMode

_MODES = {
    ReleaseMode.PARK: trainer_pb2.ReleaseRunRequest.MODE_PARK,
    ReleaseMode.HAND_OVER: trainer_pb2.ReleaseRunRequest.MODE_HAND_OVER,
    ReleaseMode.DELETE: trainer_pb2.ReleaseRunRequest.MODE_DELETE,
}


class GrpcTrainers:
    """Implements `Trainers`; keeps one channel for each address.

    Args:
        pod_key: The secret that the pods of one deployment share.
        timeout_s: Deadline of each call.
    """

    def __init__(self, *, pod_key: str, timeout_s: float) -> None:
        self._metadata = pod_metadata(pod_key)
        self._timeout_s = timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        """Close all channels."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()

    async def adopt_run(
        self, address: str, *, run: str, epoch: int, base_model: str, adapter: Adapter
    ) -> None:
        """Have a trainer take over a run."""
        request = trainer_pb2.AdoptRunRequest(
            run=run, epoch=epoch, base_model=base_model, adapter=encode_adapter(adapter)
        )
        await self._call(address, "AdoptRun", request)

    async def release_run(self, address: str, *, run: str, epoch: int, mode: ReleaseMode) -> None:
        """Have a trainer give up a run."""
        request = trainer_pb2.ReleaseRunRequest(run=run, epoch=epoch, mode=_MODES[mode])
        await self._call(address, "ReleaseRun", request)

    async def get_checkpoint_model(self, address: str, checkpoint: str) -> str:
        """Return the base model of a checkpoint."""
        request = trainer_pb2.GetCheckpointRequest(name=checkpoint)
        answer: trainer_pb2.Checkpoint = await self._call(address, "GetCheckpoint", request)
        return answer.base_model

    async def _call(self, address: str, method: str, request: object) -> Any:
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = open_channel(address)
        stub: Any = trainer_pb2_grpc.TrainerServiceStub(channel)
        async with typed_errors("trainer", may_move=True):
            return await getattr(stub, method)(
                request, timeout=self._timeout_s, metadata=self._metadata
            )
