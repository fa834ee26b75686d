"""What tests of the engine over vLLM ask of it, whatever stands in the place of its process."""

from __future__ import annotations

import asyncio

import torch

from tinsmith_engine import SampledSequence, SampleRequest, WeightVersion
from tinsmith_engine.base.types import ModelInfo
from tinsmith_sampler.engines.engine_protocol import Ticket
from tinsmith_sampler.vllm.engine import VllmEngine
from tinsmith_sampler.vllm.messages import Configure

INFO = ModelInfo(
    vocab_size=100,
    max_context_tokens=64,
    dtype="float32",
    num_parameters=1,
    exactness="fast",
    family="none",
    fingerprint="none",
)
SETTINGS = Configure(
    model="none",
    dtype="float32",
    max_model_tokens=64,
    max_sequences=4,
    max_logprobs=5,
    cache_bytes=2**30,
    max_adapters=2,
    max_host_adapters=4,
    max_adapter_rank=8,
    tensor_parallel_size=1,
)
TENSORS = {"base_model.model.q_proj.lora_A.weight": torch.ones(4, 4)}


async def sampled(
    engine: VllmEngine,
    weights: WeightVersion | None = None,
    *,
    first: int = 1,
    num_samples: int = 2,
) -> list[SampledSequence]:
    """Return completions of three tokens."""
    request = SampleRequest(
        prompt_tokens=[first, 2], max_tokens=3, num_samples=num_samples, weights=weights
    )
    ticket = Ticket(request, None)
    await engine.submit(ticket)
    return await asyncio.wrap_future(ticket.future)
