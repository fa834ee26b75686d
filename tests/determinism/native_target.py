"""A server that speaks Tinsmith's own protocol, through its SDK."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np

import tinsmith
from tests.determinism.pictures import png
from tests.determinism.plan import Publish, Request
from tests.determinism.target import Answer, Sample

LEARNING_RATE = 0.03
"""One step of Adam at this rate makes an adapter that says other things than its base."""
RANK = 8


def lesson(weights: Publish) -> list[int]:
    """Return the tokens that a version of an adapter learned last."""
    chance = np.random.default_rng([weights.adapter, weights.version])
    return [int(token) for token in chance.integers(16, 200, 12)]


class NativeTarget:
    """Trains adapters and samples from their checkpoints.

    Args:
        client: Connected to the server.
        base_model: Name of the model.
    """

    def __init__(self, client: tinsmith.Client, base_model: str) -> None:
        self._client = client
        self._base_model = base_model
        self._runs: dict[int, tinsmith.TrainingRun] = {}
        self._samplers: dict[str, tinsmith.Sampler] = {}
        # A second time on one server makes versions of its own.
        self._prefix = f"determinism-{secrets.token_hex(4)}"

    async def publish(self, weights: Publish) -> str:
        """Take one optimizer step, and save what is then there."""
        run = self._runs.get(weights.adapter)
        if run is None:
            run = await self._client.create_lora_training_run_async(
                self._base_model, rank=RANK, seed=weights.adapter
            )
            self._runs[weights.adapter] = run
        tokens = lesson(weights)
        inputs = {
            "target_tokens": np.array(tokens[1:]),
            "weights": np.ones(len(tokens) - 1, dtype=np.float32),
        }
        datum = tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)
        gradient = run.forward_backward([datum], "cross_entropy")
        step = run.optim_step(tinsmith.AdamParams(learning_rate=LEARNING_RATE))
        saved = run.save_weights_for_sampler(f"{self._prefix}-{weights.version}")
        await gradient
        await step
        checkpoint = await saved
        self._samplers[checkpoint.name] = await self._client.create_sampler_async(
            checkpoint=checkpoint
        )
        return checkpoint.name

    async def sample(self, name: str, request: Request) -> Answer:
        """Sample, and score the prompt where it is asked for."""
        found = await self._samplers[name].sample(**_arguments(request))
        return Answer(
            tuple(
                Sample(tuple(one.tokens), tuple(one.logprobs), one.stop_reason)
                for one in found.sequences
            ),
            tuple(found.prompt_logprobs or ()),
        )

    async def give_up(self, name: str, request: Request) -> None:
        """Read the first piece of a stream, and close it."""
        async with self._samplers[name].stream(**_arguments(request)) as stream:
            await anext(stream)


def _arguments(request: Request) -> dict[str, Any]:
    chunks: list[Any] = [tinsmith.EncodedTextChunk(request.prompt)]
    if request.picture is not None:
        chunks.insert(0, tinsmith.ImageChunk(png(request.picture), "png"))
    return {
        "prompt": tinsmith.ModelInput(chunks=tuple(chunks)),
        "num_samples": request.num_samples,
        "sampling_params": tinsmith.SamplingParams(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            stop=list(request.stop),
        ),
        "include_prompt_logprobs": request.scores_prompt,
    }
