"""How many tokens a call took; an image counts as one, whatever the model makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinsmith.v1 import sampler_pb2
from tinsmith_gateway.metrics import OPENAI_TOKENS
from tinsmith_gateway.openai.codec import Sampled, total_tokens
from tinsmith_gateway.openai.rendering import Prompt


def usage_of(
    prompts: Sequence[Prompt],
    samples: Sequence[Sampled],
    answers: Sequence[sampler_pb2.SampleResponse],
) -> dict[str, Any]:
    """Return the usage of a call, and count it."""
    num_prompt = sum(len(prompt.tokens) for prompt in prompts)
    num_sampled = total_tokens(samples)
    OPENAI_TOKENS.labels("prompt").inc(num_prompt)
    OPENAI_TOKENS.labels("sampled").inc(num_sampled)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
        "prompt_tokens_details": {
            "cached_tokens": sum(answer.num_cached_prompt_tokens for answer in answers)
        },
    }
