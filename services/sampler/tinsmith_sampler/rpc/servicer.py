"""Maps SamplerService onto the sampling service."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

from tinsmith import names
from tinsmith.rpc.sampler_choice import choice_of
from tinsmith.v1 import sampler_pb2, sampler_pb2_grpc
from tinsmith_engine import SampleRequest
from tinsmith_engine.contract.codec import decode_input
from tinsmith_engine.contract.model_catalog import ModelCatalog
from tinsmith_runtime.errors import (
    InvalidFieldError,
    NotFoundError,
    SamplingSessionNotFoundError,
)
from tinsmith_runtime.rpc.auth import current_caller
from tinsmith_runtime.rpc.pages import take_page
from tinsmith_runtime.rpc.requests import parse_name
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.metrics import REQUEST_SECONDS
from tinsmith_sampler.rpc import codec
from tinsmith_sampler.service import Prompt, SamplingService

Context = Any


class SamplerServicer(sampler_pb2_grpc.SamplerServiceServicer):
    """Maps SamplerService onto the domain.

    Args:
        config: Limits that are told to clients.
        service: Samples.
        catalog: The base models.
        name: Of the worker.
    """

    def __init__(
        self, config: SamplerConfig, service: SamplingService, catalog: ModelCatalog, *, name: str
    ) -> None:
        self._name = name
        self._config = config
        self._service = service
        self._catalog = catalog

    async def GetCapabilities(
        self, request: sampler_pb2.SamplerServiceGetCapabilitiesRequest, context: Context
    ) -> sampler_pb2.SamplerCapabilities:
        engine = self._service.capabilities
        return sampler_pb2.SamplerCapabilities(
            engine=engine.name if engine else "",
            engine_version=engine.version if engine else "",
            refused_fields=engine.refused if engine else (),
            models=self._catalog.select(request.base_model),
            max_samples=self._config.max_samples,
            max_topk_logprobs=self._config.max_topk_logprobs,
            max_concurrent_sequences=self._config.max_concurrent_sequences,
        )

    async def Sample(
        self, request: sampler_pb2.SampleRequest, context: Context
    ) -> sampler_pb2.SampleResponse:
        _check_session(request.sampling_session)
        prompt = codec.decode_prompt(request, key_id=current_caller().charged_key_id)
        with _Timed():
            response = codec.encode_sampled(prompt.request, await self._service.sample(prompt))
        self._note_answered(response, context)
        return response

    async def StreamSample(
        self, request: sampler_pb2.StreamSampleRequest, context: Context
    ) -> AsyncIterator[sampler_pb2.StreamSampleResponse]:
        _check_session(request.sampling_session)
        prompt, received = codec.decode_stream(request, key_id=current_caller().charged_key_id)
        with _Timed():
            stream = await self._service.stream(prompt, received)
            # A call that is cancelled while it sends does not come back here.
            context.add_done_callback(lambda _: stream.close())
            try:
                async for delivery in stream:
                    for message in codec.encode_delivery(prompt.request, delivery, stream.seed):
                        if message.HasField("prompt"):
                            self._note_answered(message.prompt, context)
                        yield message
            finally:
                stream.close()

    def _note_answered(self, response: sampler_pb2.SampleResponse, context: Context) -> None:
        """Write into an answer by which sampler it is, and why."""
        response.sampler = self._name
        response.sampler_choice = choice_of(context.invocation_metadata())

    async def ComputeLogprobs(
        self, request: sampler_pb2.ComputeLogprobsRequest, context: Context
    ) -> sampler_pb2.ComputeLogprobsResponse:
        _check_session(request.sampling_session)
        if request.min_version < 0:
            raise InvalidFieldError("min_version", "must be at least 0")
        tokens_T, images = decode_input(request.input, field="input")
        prompt = Prompt(
            session=request.sampling_session,
            request=SampleRequest(
                prompt_tokens=tokens_T.tolist(), images=images, max_tokens=0, prompt_logprobs=True
            ),
            tokens_field="input",
            min_version=request.min_version,
            key_id=current_caller().charged_key_id,
        )
        with _Timed():
            sampled = await self._service.sample(prompt)
        scored = codec.encode_sampled(prompt.request, sampled)
        return sampler_pb2.ComputeLogprobsResponse(
            logprobs=scored.prompt_logprobs, version=sampled.version
        )

    async def ListLoadedWeights(
        self, request: sampler_pb2.ListLoadedWeightsRequest, context: Context
    ) -> sampler_pb2.ListLoadedWeightsResponse:
        project = parse_name(names.ProjectName, request.parent, "parent")
        current_caller().require_project(
            project.project, lambda: NotFoundError(f"{request.parent} does not exist")
        )
        page, token = take_page(
            f"{project}/loadedWeights",
            self._service.loaded(str(project)),
            lambda loaded: f"{loaded.source}@{loaded.version:020d}",
            request,
        )
        return sampler_pb2.ListLoadedWeightsResponse(
            weights=[
                sampler_pb2.LoadedWeights(
                    source=loaded.source,
                    version=loaded.version,
                    num_active_sequences=loaded.num_requests,
                )
                for loaded in page
            ],
            next_page_token=token,
        )


class _Timed:
    def __enter__(self) -> None:
        self._begin_s = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        REQUEST_SECONDS.observe(time.perf_counter() - self._begin_s)


def _check_session(value: str) -> None:
    """Refuse a session of another project as one that does not exist."""
    name = parse_name(names.SamplingSessionName, value, "sampling_session")
    current_caller().require_project(
        name.project,
        lambda: SamplingSessionNotFoundError(
            f"sampling session {value} does not exist in your project, or its session ended; "
            "create a new one",
            sampling_session=value,
        ),
    )
