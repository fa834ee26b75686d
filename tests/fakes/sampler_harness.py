"""A real sampler pod with the real engine, and fakes of the two pods that it asks."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch
from grpc_status import rpc_status
from safetensors.torch import save
from tests.fakes.scheduler import FakeScheduler, bearer
from tests.support.pod_keys import POD_KEY

from tinsmith.rpc.error_codec import decode_status
from tinsmith.tensors import decode_tensor, encode_tokens
from tinsmith.v1 import (
    checkpoint_pb2,
    checkpoint_pb2_grpc,
    sampler_pb2,
    sampler_pb2_grpc,
    scheduler_pb2,
    trainer_control_pb2,
    trainer_control_pb2_grpc,
    trainer_pb2_grpc,
    trajectories_pb2,
)
from tinsmith_engine import AdapterConfig, Engine, LoraConfig
from tinsmith_engine.files.weight_files import weights_file
from tinsmith_engine.host import EngineHost
from tinsmith_runtime import storage
from tinsmith_runtime.adapters import adapter_to_json
from tinsmith_runtime.errors import (
    CheckpointNotFoundError,
    KeyInvalidError,
    RunNotFoundError,
    TinsmithError,
)
from tinsmith_runtime.rpc.auth import Authenticator, Caller
from tinsmith_runtime.rpc.server import PodServer, ServerConfig
from tinsmith_runtime.storage import checkpoint_manifests
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.engines.embedded_engine import EmbeddedEngines
from tinsmith_sampler.engines.engine_protocol import EngineSource
from tinsmith_sampler.pod import SamplerPod
from tinsmith_sampler.weights.weight_source import ExportLive
from tinsmith_trainer.execution.snapshot_format import OPTIMIZER_FILE

BASE_MODEL = "tiny"
PROJECT = "p"
TIMEOUT_S = 60.0
PROMPT = (5, 6, 7, 8)


class FakeTrainer(
    trainer_pb2_grpc.TrainerServiceServicer,
    checkpoint_pb2_grpc.CheckpointServiceServicer,
    trainer_control_pb2_grpc.TrainerControlServiceServicer,
):
    """Knows the checkpoints and published weights that a test gives it."""

    def __init__(self) -> None:
        self.checkpoints: dict[str, checkpoint_pb2.Checkpoint] = {}
        self.exported: dict[str, trainer_control_pb2.ExportWeightsResponse] = {}
        self.replaced: list[trainer_control_pb2.ExportWeightsResponse] = []
        self.num_exports = 0
        self.server = PodServer(
            ServerConfig(drain_timeout_s=0.01),
            domain="trainer.tinsmith",
            authenticator=Authenticator(self, roots=[POD_KEY]),
        )
        for add in (
            trainer_pb2_grpc.add_TrainerServiceServicer_to_server,
            checkpoint_pb2_grpc.add_CheckpointServiceServicer_to_server,
            trainer_control_pb2_grpc.add_TrainerControlServiceServicer_to_server,
        ):
            self.server.add(add, self)

    async def verify(self, key_id: str, secret_sha256: bytes, check: str = "") -> Caller:
        raise KeyInvalidError("only pods call this trainer")

    async def GetCheckpoint(self, request: Any, context: Any) -> checkpoint_pb2.Checkpoint:
        if request.name not in self.checkpoints:
            raise CheckpointNotFoundError(f"checkpoint {request.name} does not exist")
        return self.checkpoints[request.name]

    async def ExportWeights(
        self, request: Any, context: Any
    ) -> trainer_control_pb2.ExportWeightsResponse:
        self.num_exports += 1
        if request.run not in self.exported:
            raise RunNotFoundError(f"run {request.run} does not exist")
        # What was named just before the run stepped on.
        return self.replaced.pop(0) if self.replaced else self.exported[request.run]


def make_request(
    session: str,
    tokens: Sequence[int] = PROMPT,
    *,
    stop: Sequence[int] | None = (),
    num_samples: int = 1,
    prompt_logprobs: bool = False,
    topk_prompt_logprobs: int = 0,
    min_version: int = 0,
    extras: Mapping[str, Any] | None = None,
    **params: Any,
) -> sampler_pb2.SampleRequest:
    """Return a request for 8 tokens with seed 1; `stop` None leaves the stop tokens out.

    Fields of the request that few need are given as `extras`, others are parameters.
    """
    request = sampler_pb2.SampleRequest(
        sampling_session=session,
        num_samples=num_samples,
        params=trajectories_pb2.SamplingParams(**{"max_tokens": 8, "seed": 1, **params}),
        prompt_logprobs=prompt_logprobs,
        topk_prompt_logprobs=topk_prompt_logprobs,
        min_version=min_version,
        **(extras or {}),
    )
    request.prompt.chunks.add(tokens=encode_tokens(tokens))
    if stop is not None:
        request.params.stop_tokens.SetInParent()
        request.params.stop_tokens.token_ids.extend(stop)
    return request


def tokens_of(response: sampler_pb2.SampleResponse) -> list[list[int]]:
    """Return the completions of a response."""
    return [decode_tensor(sequence.tokens).tolist() for sequence in response.sequences]


def versions_of(response: sampler_pb2.SampleResponse) -> set[int]:
    """Return the versions that produced the tokens of a response."""
    return {
        version
        for sequence in response.sequences
        for version in decode_tensor(sequence.versions).tolist()
    }


async def refusal(call: Awaitable[Any]) -> TinsmithError:
    """Return the typed error that a call is refused with."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        status = rpc_status.from_call(error)
        if status is None:
            raise
        return decode_status(status)
    raise AssertionError(f"not refused: {answer}")


def code_of(error: TinsmithError) -> str:
    """Return the name of an error's status code."""
    return error.code.name


class SamplerRig:
    """A pod, the scheduler and trainer that it asks, a store that it reads, and a channel."""

    def __init__(
        self,
        folder: Path,
        host: EngineHost,
        *,
        export_live: ExportLive | None = None,
        source: EngineSource | None = None,
        **settings: Any,
    ) -> None:
        self.host = host
        self._source = source or EmbeddedEngines(host)
        self._export_live = export_live
        self.scheduler = FakeScheduler()
        self.trainer = FakeTrainer()
        self.store = storage.open(f"file://{folder}")
        self.key = self.scheduler.new_key(PROJECT)
        self.pod: SamplerPod
        self.channel: grpc.aio.Channel
        self.stub: Any
        self._settings = settings

    async def start(self) -> None:
        await self.scheduler.server.start()
        await self.trainer.server.start()
        config = SamplerConfig(
            **{
                "storage_uri": self.store.uri,
                "scheduler_address": self.scheduler.server.address,
                "pod_key": POD_KEY,
                "drain_timeout_s": 0.05,
                **self._settings,
            }
        )
        self.pod = SamplerPod(config, self._source, export_live=self._export_live)
        await self.pod.start()
        self.channel = grpc.aio.insecure_channel(self.pod.address)
        self.stub = sampler_pb2_grpc.SamplerServiceStub(self.channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.pod.stop()
        await self.trainer.server.stop()
        await self.scheduler.server.stop()

    def call(
        self,
        method: str,
        request: Any,
        *,
        key: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> Any:
        """Call any method of the sampler, as the project of the rig unless told otherwise."""
        metadata = bearer(self.key if key is None else key)
        return getattr(self.stub, method)(request, metadata=metadata, timeout=timeout_s)

    def sample(self, session: str, *args: Any, key: str | None = None, **options: Any) -> Any:
        """Draw completions; the arguments are those of `make_request`."""
        return self.call("Sample", make_request(session, *args, **options), key=key)

    def stream(
        self,
        session: str,
        *args: Any,
        received: Sequence[int] = (),
        timeout_s: float = TIMEOUT_S,
        **options: Any,
    ) -> Any:
        """Stream completions; the arguments are those of `make_request`."""
        request = sampler_pb2.StreamSampleRequest(
            sampling_session=session,
            request=make_request("", *args, **options),
            received_tokens=received,
        )
        return self.call("StreamSample", request, timeout_s=timeout_s)

    async def logprobs(self, session: str, tokens: Sequence[int] = PROMPT) -> list[float]:
        """Score a sequence."""
        request = sampler_pb2.ComputeLogprobsRequest(sampling_session=session)
        request.input.chunks.add(tokens=encode_tokens(tokens))
        response = await self.call("ComputeLogprobs", request)
        return [float(value) for value in decode_tensor(response.logprobs)]

    async def num_active(self) -> int:
        """Return how many requests hold weights of the project."""
        request = sampler_pb2.ListLoadedWeightsRequest(parent=f"projects/{PROJECT}")
        answer = await self.call("ListLoadedWeights", request)
        return sum(weights.num_active_sequences for weights in answer.weights)

    def session(self, *, project: str = PROJECT, trainer_address: str = "", **source: str) -> str:
        """Open a sampling session of a base model, checkpoint or run, and return its name.

        The fake trainer has the weights unless another address is given.
        """
        name = f"projects/{project}/samplingSessions/smp-{uuid.uuid4().hex[:8]}"
        self.scheduler.sampling_sessions[name] = scheduler_pb2.SamplingSession(
            name=name,
            base_model=BASE_MODEL,
            trainer_address=trainer_address or self.trainer.server.address,
            **source,
        )
        return name

    async def checkpoint(self, checkpoint_id: str, *, seed: int = 1, version: int = 1) -> str:
        """Save an adapter with random weights as a checkpoint, and return its name."""
        config = LoraConfig(rank=4, seed=seed)
        tensors = await self.random_adapter(config)
        return await self.saved(checkpoint_id, config, tensors, version=version)

    async def random_adapter(self, config: LoraConfig) -> dict[str, torch.Tensor]:
        """Return an adapter with random weights, which its seed makes."""
        return await self.host.call(_random_adapter, self.host.engine(BASE_MODEL), config)

    async def saved(
        self,
        checkpoint_id: str,
        config: AdapterConfig,
        tensors: Mapping[str, torch.Tensor],
        *,
        version: int = 1,
    ) -> str:
        """Save weights as a checkpoint, and return its name."""
        name = f"projects/{PROJECT}/trainingRuns/r/checkpoints/{checkpoint_id}"
        folder = f"{name}-{uuid.uuid4().hex[:8]}"
        written = await self._write(folder, config, tensors, version)
        self.trainer.checkpoints[name] = checkpoint_pb2.Checkpoint(
            name=name,
            base_model=BASE_MODEL,
            version=version,
            manifest_uri=written.uri,
            manifest_sha256=written.sha256,
        )
        return name

    def folder(self, checkpoint: str) -> Path:
        """Return where the files of a checkpoint are."""
        uri = self.trainer.checkpoints[checkpoint].manifest_uri
        return Path(uri.removeprefix("file://")).parent

    async def export(self, run_id: str, *, seed: int, version: int) -> str:
        """Give a live run new random weights, and return its name."""
        name = f"projects/{PROJECT}/trainingRuns/{run_id}"
        config = LoraConfig(rank=4, seed=seed)
        folder = f"{name}/published/{version}-{seed}"
        written = await self._write(folder, config, await self.random_adapter(config), version)
        self.trainer.exported[name] = trainer_control_pb2.ExportWeightsResponse(
            version=version, manifest_uri=written.uri, manifest_sha256=written.sha256
        )
        return name

    async def _write(
        self,
        folder: str,
        config: AdapterConfig,
        tensors: Mapping[str, torch.Tensor],
        version: int,
    ) -> checkpoint_manifests.WrittenManifest:
        attributes = {
            "folder": folder,
            "base_model": BASE_MODEL,
            "adapter": adapter_to_json(config),
            "version": version,
        }
        files = {weights_file(config): save(dict(tensors)), OPTIMIZER_FILE: b"not for samplers"}
        return await asyncio.to_thread(
            checkpoint_manifests.write_checkpoint, self.store, folder, files, attributes
        )

    @contextlib.contextmanager
    def engine_held(self) -> Iterator[None]:
        """Keep the engine busy, so that what is asked for waits."""
        release = threading.Event()
        held = self.host.thread.submit(release.wait)
        try:
            yield
        finally:
            release.set()
            held.result(TIMEOUT_S)


@contextlib.asynccontextmanager
async def running_sampler(
    folder: Path, host: EngineHost, **settings: Any
) -> AsyncIterator[SamplerRig]:
    """Run a sampler pod for the time of a test."""
    rig = SamplerRig(folder, host, **settings)
    await rig.start()
    try:
        yield rig
    finally:
        await rig.stop()


def _random_adapter(engine: Engine, config: LoraConfig) -> dict[str, torch.Tensor]:
    """Return an adapter that changes what the model says; runs on the engine's thread."""
    name = f"random-{uuid.uuid4().hex}"
    engine.create_run(name, config)
    tensors, _ = engine.adapter_tensors(name)
    engine.drop_run(name)
    generator = torch.Generator().manual_seed(config.seed)
    for tensor_name, tensor in tensors.items():
        if "lora_B" in tensor_name:
            tensor.normal_(std=0.1, generator=generator)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def as_floats(tensor: Any) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Return the numbers of a tensor message."""
    return np.asarray(decode_tensor(tensor), dtype=np.float32)
