"""A server that speaks the Tinker wire, through the `tinker` SDK."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import numpy as np
import tinker
from tinker import types

from tests.determinism.native_target import LEARNING_RATE, RANK, lesson
from tests.determinism.pictures import png
from tests.determinism.plan import Publish, Request
from tests.determinism.target import Answer, Sample

_HEAD_START_S = 0.02
"""Time that a request which is given up has to reach the server."""


class TinkerTarget:
    """Trains adapters and samples from their saved weights.

    Args:
        service: A client of the server.
        base_model: Name of the model.
    """

    def __init__(self, service: tinker.ServiceClient, base_model: str) -> None:
        self._service = service
        self._base_model = base_model
        self._models: dict[int, tinker.TrainingClient] = {}
        self._samplers: dict[str, tinker.SamplingClient] = {}
        self._prefix = f"determinism-{secrets.token_hex(4)}"

    async def publish(self, weights: Publish) -> str:
        """Take one optimizer step, and save what is then there."""
        model = self._models.get(weights.adapter)
        if model is None:
            model = await self._service.create_lora_training_client(
                self._base_model, rank=RANK, seed=weights.adapter
            )
            self._models[weights.adapter] = model
        tokens = lesson(weights)
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData.from_numpy(np.array(tokens[1:])),
                "weights": types.TensorData.from_numpy(np.ones(len(tokens) - 1, np.float32)),
            },
        )
        gradient = model.forward_backward([datum], "cross_entropy")
        step = model.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
        saved = model.save_weights_for_sampler(f"{self._prefix}-{weights.version}")
        await gradient
        await step
        path = str((await saved).path)
        self._samplers[path] = await self._service.create_sampling_client(model_path=path)
        return path

    async def sample(self, name: str, request: Request) -> Answer:
        """Sample, and score the prompt where it is asked for."""
        found = await self._samplers[name].sample(**_arguments(request))
        return Answer(
            tuple(
                Sample(tuple(one.tokens), tuple(one.logprobs or ()), str(one.stop_reason))
                for one in found.sequences
            ),
            tuple(found.prompt_logprobs or ()),
        )

    async def give_up(self, name: str, request: Request) -> None:
        """Send a request, and cancel its future if it has not ended by itself."""
        sample = self._samplers[name].sample(**_arguments(request)).coroutine()
        sent = asyncio.create_task(sample)
        await asyncio.wait([sent], timeout=_HEAD_START_S)
        sent.cancel()
        await asyncio.wait([sent])


def _arguments(request: Request) -> dict[str, Any]:
    chunks: list[types.ModelInputChunk] = [types.EncodedTextChunk(tokens=request.prompt)]
    if request.picture is not None:
        chunks.insert(0, types.ImageChunk(data=png(request.picture), format="png"))
    return {
        "prompt": types.ModelInput(chunks=chunks),
        "num_samples": request.num_samples,
        "sampling_params": types.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            stop=list(request.stop),
        ),
        "include_prompt_logprobs": request.scores_prompt,
    }
