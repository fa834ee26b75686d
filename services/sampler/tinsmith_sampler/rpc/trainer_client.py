"""How a sampler talks to trainers: where a checkpoint is, and the newest weights of a run."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from tinsmith.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    trainer_control_pb2,
    trainer_control_pb2_grpc,
)
from tinsmith_engine.contract.weight_codec import decode_index
from tinsmith_runtime.errors import WorkerUnavailableError
from tinsmith_runtime.rpc.pod_identity import PodCredentials, PodRole
from tinsmith_runtime.rpc.scheduler_client import typed_errors
from tinsmith_runtime.sealed_memory import MemoryLocation, memory_domain
from tinsmith_sampler.weights.trainer_protocol import (
    ExportedWeights,
    StoredWeights,
    WeightChunk,
    WeightDescription,
)

# An export waits for the operation that is being computed.
_CALL_TIMEOUT_S = 120.0


class TrainerClient:
    """Connections to the trainers of a deployment, made when they are needed."""

    def __init__(self, credentials: PodCredentials) -> None:
        self._credentials = credentials
        self._metadata = credentials.metadata
        self._channels: dict[str, Any] = {}

    async def close(self) -> None:
        """Close all connections."""
        for channel in self._channels.values():
            await channel.close()

    async def export_to_store(self, address: str, run: str) -> StoredWeights:
        """Return the newest weights of a run, written to the store if they are not there yet.

        Raises:
            RunNotFoundError: If the trainer does not hold the run.
            WorkerUnavailableError: If it cannot be reached.
        """
        request = trainer_control_pb2.ExportWeightsRequest(run=run)
        answer = await self._call(
            address, trainer_control_pb2_grpc.TrainerControlServiceStub, "ExportWeights", request
        )
        return StoredWeights(answer.version, answer.manifest_uri, answer.manifest_sha256)

    async def newest(self, address: str, run: str) -> ExportedWeights | StoredWeights:
        """Return the newest weights of a run, in memory or, of an older trainer, in the store.

        Raises:
            RunNotFoundError: If the trainer does not hold the run.
            WorkerUnavailableError: If it cannot be reached.
        """
        request = trainer_control_pb2.ExportWeightsRequest(
            run=run, destination=trainer_control_pb2.ExportWeightsRequest.DESTINATION_MEMORY
        )
        answer = await self._call(
            address, trainer_control_pb2_grpc.TrainerControlServiceStub, "ExportWeights", request
        )
        if answer.weights_id:
            return ExportedWeights(answer.version, answer.weights_id)
        return StoredWeights(answer.version, answer.manifest_uri, answer.manifest_sha256)

    async def read(
        self, address: str, run: str, weights_id: str, *, offset: int, held: str, maps_memory: bool
    ) -> AsyncGenerator[WeightDescription | WeightChunk, None]:
        """Yield the description of weights in memory, then their chunks; see `Trainers.read`."""
        request = trainer_control_pb2.ReadWeightsRequest(
            run=run,
            weights_id=weights_id,
            offset=offset,
            held_weights_id=held,
            memory_domain=memory_domain() if maps_memory else "",
        )
        stub: Any = trainer_control_pb2_grpc.TrainerControlServiceStub(self._channel(address))
        async with typed_errors("trainer", may_move=True):
            call = stub.ReadWeights(request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata)
            try:
                async for message in call:
                    if message.index:
                        yield _decode_description(message)
                    else:
                        yield WeightChunk(message.offset, message.data)
            finally:
                call.cancel()

    async def checkpoint(self, address: str, name: str) -> StoredWeights:
        """Return where the files of a checkpoint are.

        Raises:
            CheckpointNotFoundError: If there is none of this name.
            WorkerUnavailableError: If the trainer cannot be reached.
        """
        request = checkpoint_pb2.GetCheckpointRequest(name=name)
        answer = await self._call(
            address, checkpoint_pb2_grpc.CheckpointServiceStub, "GetCheckpoint", request
        )
        return StoredWeights(
            answer.version,
            answer.manifest_uri,
            answer.manifest_sha256,
            is_published=answer.state == checkpoint_pb2.Checkpoint.STATE_PUBLISHED,
        )

    async def _call(
        self, address: str, stub: Callable[[Any], Any], method: str, request: Any
    ) -> Any:
        channel = self._channel(address)
        async with typed_errors("trainer", may_move=True):
            return await getattr(stub(channel), method)(
                request, timeout=_CALL_TIMEOUT_S, metadata=self._metadata
            )

    def _channel(self, address: str) -> Any:
        if not address:
            raise WorkerUnavailableError(
                "no trainer holds the run at the moment; send the request again"
            )
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._credentials.open_channel(
                address, PodRole.TRAINER
            )
        return channel


def _decode_description(message: trainer_control_pb2.ReadWeightsResponse) -> WeightDescription:
    location = None
    if message.HasField("shared_memory"):
        memory = message.shared_memory
        location = MemoryLocation(memory.pid, memory.descriptor, memory.inode)
    return WeightDescription(decode_index(message.index, sha256=message.index_sha256), location)
