"""What a call to a sampler is about: the only requests that are decoded on their way through."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf.message import DecodeError

from tinsmith.errors import InvalidArgumentError, ResourceExhaustedError
from tinsmith.replicas import prompt_bytes
from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_runtime.rpc.message_parts import check_request, max_parts_of

_PROMPTS: Mapping[str, tuple[Any, Callable[[Any], trajectories_pb2.ModelInput]]] = {
    "Sample": (sampler_pb2.SampleRequest, lambda request: request.prompt),
    "StreamSample": (sampler_pb2.StreamSampleRequest, lambda request: request.request.prompt),
    "ComputeLogprobs": (sampler_pb2.ComputeLogprobsRequest, lambda request: request.input),
}


async def prompt_of(method: str, body: bytes) -> bytes:
    """Return what says which sampler is preferred; see `replicas.prompt_bytes`.

    Nothing else depends on it: a body that cannot be read has none, and the sampler refuses it.

    Args:
        method: `/package.Service/Method` of a call that samples.
        body: Of the request.
    """
    message, prompt = _PROMPTS[method.rpartition("/")[2]]
    try:
        await check_request(body, message.DESCRIPTOR, max_parts_of(method))
        return prompt_bytes(prompt(message.FromString(body)))
    except (DecodeError, InvalidArgumentError, ResourceExhaustedError):
        return b""
