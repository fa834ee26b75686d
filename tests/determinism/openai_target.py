"""A server that speaks OpenAI's API, through the `openai` SDK."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable
from typing import Any

import openai

from tests.determinism.pictures import png
from tests.determinism.plan import Publish, Request
from tests.determinism.target import Answer, Sample

Publisher = Callable[[Publish], Awaitable[str]]
"""Makes a version, and returns the name of the model that it is."""


class OpenAITarget:
    """Samples from models by their names; the API has no call that makes weights.

    Prompts go to `/v1/completions` as ids of tokens, and those with a picture to
    `/v1/chat/completions`. `top_k` and scores of prompts are no part of the API and left out.

    Args:
        client: Of the server.
        publish: Makes weights by other means.
    """

    def __init__(self, client: openai.AsyncOpenAI, publish: Publisher) -> None:
        self._client = client
        self._publish = publish

    async def publish(self, weights: Publish) -> str:
        """Make a version as the caller does it."""
        return await self._publish(weights)

    async def sample(self, name: str, request: Request) -> Answer:
        """Return the choices; their tokens are texts."""
        if request.picture is not None:
            chat = await self._client.chat.completions.create(**_chat(name, request))
            return Answer(tuple(_chat_sample(choice) for choice in chat.choices))
        found = await self._client.completions.create(**_completion(name, request))
        return Answer(tuple(_completion_sample(choice) for choice in found.choices))

    async def give_up(self, name: str, request: Request) -> None:
        """Read the first event of a stream, and close it."""
        if request.picture is not None:
            arguments = _chat(name, request)
            chunks = await self._client.chat.completions.create(**arguments, stream=True)
        else:
            arguments = _completion(name, request)
            chunks = await self._client.completions.create(**arguments, stream=True)
        async with chunks:
            await anext(aiter(chunks))


def _common(name: str, request: Request) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": name,
        "n": request.num_samples,
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "seed": request.seed,
    }
    return found | ({"stop": list(request.stop)} if request.stop else {})


def _completion(name: str, request: Request) -> dict[str, Any]:
    return _common(name, request) | {"prompt": list(request.prompt), "logprobs": 1}


def _chat(name: str, request: Request) -> dict[str, Any]:
    assert request.picture is not None
    url = f"data:image/png;base64,{base64.b64encode(png(request.picture)).decode()}"
    content = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": " ".join(map(str, request.prompt[-8:]))},
    ]
    messages = [{"role": "user", "content": content}]
    return _common(name, request) | {"messages": messages, "logprobs": True}


def _completion_sample(choice: Any) -> Sample:
    logprobs = choice.logprobs
    return Sample(
        tuple(logprobs.tokens or ()),
        tuple(logprobs.token_logprobs or ()),
        str(choice.finish_reason),
        choice.text,
    )


def _chat_sample(choice: Any) -> Sample:
    content = choice.logprobs.content or ()
    return Sample(
        tuple(one.token for one in content),
        tuple(one.logprob for one in content),
        str(choice.finish_reason),
        choice.message.content or "",
    )
