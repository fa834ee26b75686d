"""`POST /v1/completions`: text or token ids, continued.

Several prompts are one request of each, sampled beside each other. Without a seed each draws its
own; with one all have that seed, so that a prompt is completed alike alone and among others.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import JSONResponse, Response

from tinsmith.tensors import decode_tensor
from tinsmith.v1 import sampler_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.openai import codec
from tinsmith_gateway.openai.answered_by import AnsweredBy
from tinsmith_gateway.openai.bodies import CompletionBody
from tinsmith_gateway.openai.codec import Sampled
from tinsmith_gateway.openai.model_calls import Answered, ModelCalls, Target
from tinsmith_gateway.openai.rendering import Prompt, prompt_of_tokens
from tinsmith_gateway.openai.requests import call_id_of
from tinsmith_gateway.openai.streaming import begin_stream, merged, until_disconnect
from tinsmith_gateway.openai.text.completion_text import Answer, completion_logprobs
from tinsmith_gateway.openai.text.token_offsets import SampleOffsets, prompt_offsets
from tinsmith_gateway.openai.usage import usage_of
from tinsmith_gateway.tokenizing.model_tokenizer import ChatTokenizer
from tinsmith_runtime.errors import InvalidFieldError

_DEFAULT_MAX_TOKENS = 16
_MAX_CONCURRENT_PROMPTS = 32


async def completion(calls: ModelCalls, call: Call) -> Response:
    """Continue prompts."""
    body = await call.parse(CompletionBody)
    body.check_offered()
    if body.max_tokens == 0 and call.credential.episode is not None:
        raise InvalidFieldError("max_tokens", "must be at least 1 under the key of an episode")
    completion = _Completion(calls, call, body)
    if body.stream:
        return await begin_stream(call, completion.chunks(), completion.answered_by)
    content = await until_disconnect(call.request, completion.whole())
    return JSONResponse(content, headers=completion.answered_by.headers)


@dataclass(frozen=True, slots=True)
class _Part:
    """One prompt of a request.

    Attributes:
        number: Its place among the prompts.
        call_id: Of the call that is made for it.
        text: As it is echoed.
        prompt: What the model reads.
        request: What the sampler is asked.
    """

    number: int
    call_id: uuid.UUID
    text: str
    prompt: Prompt
    request: sampler_pb2.SampleRequest


class _Completion:
    def __init__(self, calls: ModelCalls, call: Call, body: CompletionBody) -> None:
        self._calls = calls
        self._credential = call.credential
        self._admission = call.admission
        self._body = body
        self._call_id = call_id_of(call)
        self.answered_by = AnsweredBy()
        episode = call.credential.episode
        self._head = {
            "id": f"cmpl-{self._call_id.hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model or ("" if episode is None else episode.model),
        }

    async def whole(self) -> dict[str, Any]:
        """Return the completions once they are drawn."""
        async with self._calls.target(self._credential, self._body.model) as target:
            parts = await self._calls.aside(
                target, self._prepare, target, num_text=self._body.num_text
            )
            self._admission.add_tokens(sum(len(part.prompt.tokens) for part in parts))
            places = asyncio.Semaphore(_MAX_CONCURRENT_PROMPTS)
            tasks = [asyncio.create_task(self._draw(target, part, places)) for part in parts]
            try:
                drawn = await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            choices = await self._calls.aside(target, self._choices, parts, drawn, target.tokenizer)
            samples = [sampled for answered in drawn for sampled in answered.samples]
            abouts = [answered.about_prompt for answered in drawn]
            for about in abouts:
                self.answered_by.note(about)
            usage = usage_of([part.prompt for part in parts], samples, abouts)
            return {**self._head, "choices": choices, "usage": usage}

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the completions as they are drawn."""
        async with self._calls.target(self._credential, self._body.model) as target:
            parts = await self._calls.aside(
                target, self._prepare, target, num_text=self._body.num_text
            )
            self._admission.add_tokens(sum(len(part.prompt.tokens) for part in parts))
            totals = _Totals()
            streams = [self._stream(target, part, totals) for part in parts]
            async for chunk in merged(streams):
                yield chunk
            if self._body.wants_usage:
                prompts = [part.prompt for part in parts]
                usage = usage_of(prompts, totals.samples, totals.abouts)
                yield {**self._head, "choices": [], "usage": usage}

    def _prepare(self, target: Target) -> list[_Part]:
        """Return the prompts as tokens. Takes milliseconds: not for the event loop."""
        body, tokenizer = self._body, target.tokenizer
        parts = []
        for number, given in enumerate(body.prompts):
            if isinstance(given, str):
                text = given
                tokens = tokenizer.encode(given, add_special_tokens=body.add_special_tokens)
            else:
                text = tokenizer.decode(given) if body.echo else ""
                tokens = given
            call_id = uuid.uuid5(self._call_id, str(number))
            prompt = prompt_of_tokens(tokens)
            # A sampler always draws; what was not asked for is left out of the answer.
            max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens or 1
            params = codec.encode_params(
                body,
                max_tokens=max_tokens,
                seed=codec.seed_of(body, call_id),
                output_format=body.output_format,
            )
            request = codec.encode_request(
                prompt,
                params,
                num_samples=body.num_samples,
                num_top=body.logprobs or 0,
                is_live=target.handle.is_live,
            )
            if body.echo and body.logprobs is not None:
                request.prompt_logprobs = True
                request.topk_prompt_logprobs = body.logprobs
            parts.append(_Part(number, call_id, text, prompt, request))
        return parts

    async def _draw(self, target: Target, part: _Part, places: asyncio.Semaphore) -> Answered:
        async with places:
            answered = await self._calls.sample(target, part.request)
            await self._calls.record(
                target, part.call_id, part.prompt, part.request, answered.samples
            )
        if self._body.max_tokens == 0:
            nothing = [Sampled(stop_reason="length") for _ in answered.samples]
            return Answered(nothing, answered.about_prompt)
        return answered

    async def _stream(
        self, target: Target, part: _Part, totals: _Totals
    ) -> AsyncGenerator[dict[str, Any]]:
        answers = [self._answer(target.tokenizer) for _ in range(part.request.num_samples)]
        offsets = [self._offsets(target.tokenizer) for _ in answers]
        begun: set[int] = set()
        last: dict[str, Any] = {}
        num_open = len(answers)
        async for piece in self._calls.stream(target, part.request):
            if piece.about_prompt is not None:
                totals.abouts.append(piece.about_prompt)
                self.answered_by.note(piece.about_prompt)
            answer = answers[piece.index]
            pushed = await target.tokenizer.quickly(answer.push, piece.sampled)
            text = "".join(str(one) for one in pushed)
            logprobs = None
            if self._body.logprobs is not None:
                logprobs = await target.tokenizer.quickly(
                    self._logprobs, piece.sampled, target.tokenizer, offsets[piece.index]
                )
            choice = {
                "index": part.number * len(answers) + piece.index,
                "text": text,
                "logprobs": logprobs,
                "finish_reason": answer.finish_reason,
                **self._exact(piece.sampled, None if piece.index in begun else part.prompt),
            }
            begun.add(piece.index)
            usage = {"usage": None} if self._body.wants_usage else {}
            chunk = {**self._head, "choices": [choice], **usage}
            num_open -= bool(answer.finish_reason)
            if not num_open:
                # Once the call is recorded: a client takes the last end for the end of all.
                last = chunk
            elif text or logprobs or answer.finish_reason or self._body.return_token_ids:
                yield chunk
        samples = [answer.sampled for answer in answers]
        await self._calls.record(target, part.call_id, part.prompt, part.request, samples)
        totals.samples.extend(samples)
        yield last

    def _choices(
        self, parts: Sequence[_Part], drawn: Sequence[Answered], tokenizer: ChatTokenizer
    ) -> list[dict[str, Any]]:
        """Return the samples as they are read. Takes seconds for many: not for the event loop."""
        return [
            self._choice(part, index, sampled, answered, tokenizer)
            for part, answered in zip(parts, drawn, strict=True)
            for index, sampled in enumerate(answered.samples)
        ]

    def _choice(
        self,
        part: _Part,
        index: int,
        sampled: Sampled,
        answered: Answered,
        tokenizer: ChatTokenizer,
    ) -> dict[str, Any]:
        answer = self._answer(tokenizer)
        text = "".join(str(one) for one in answer.push(sampled))
        prefix = part.text if self._body.echo else ""
        logprobs = None
        if self._body.logprobs is not None:
            offsets = self._offsets(tokenizer, len(prefix))
            logprobs = self._logprobs(sampled, tokenizer, offsets)
            if self._body.echo:
                before = self._prompt_logprobs(part, answered.about_prompt, tokenizer)
                logprobs = {
                    key: None if before[key] is None else before[key] + logprobs[key]
                    for key in before
                }
        return {
            "index": part.number * len(answered.samples) + index,
            "text": prefix + text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            **self._exact(sampled, part.prompt),
        }

    def _prompt_logprobs(
        self, part: _Part, about: sampler_pb2.SampleResponse, tokenizer: ChatTokenizer
    ) -> dict[str, Any]:
        num_top = self._body.logprobs or 0
        tops = codec.decode_top(about.topk_prompt_logprobs) if num_top else []
        values = [float(value) for value in decode_tensor(about.prompt_logprobs)]
        return completion_logprobs(
            part.prompt.tokens,
            values,
            tops,
            tokenizer,
            offsets=prompt_offsets(part.prompt.tokens, part.text, tokenizer.decode),
            num_top=num_top,
        )

    def _offsets(self, tokenizer: ChatTokenizer, begin: int = 0) -> SampleOffsets:
        decode = tokenizer.decoder(skip_special=self._body.skip_special_tokens)
        return SampleOffsets(decode, begin)

    def _logprobs(
        self, sampled: Sampled, tokenizer: ChatTokenizer, offsets: SampleOffsets
    ) -> dict[str, Any]:
        return completion_logprobs(
            sampled.tokens,
            sampled.logprobs,
            sampled.top,
            tokenizer,
            offsets=offsets.push(sampled.tokens),
            num_top=self._body.logprobs or 0,
        )

    def _exact(self, sampled: Sampled, prompt: Prompt | None) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        exact: dict[str, Any] = {"token_ids": sampled.tokens, "versions": sampled.versions}
        return exact if prompt is None else {**exact, "prompt_token_ids": list(prompt.tokens)}

    def _answer(self, tokenizer: ChatTokenizer) -> Answer:
        return Answer(
            tokenizer,
            stops=self._body.stops,
            min_tokens=self._body.min_tokens or 0,
            skip_special=self._body.skip_special_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Totals:
    samples: list[Sampled] = field(default_factory=list)
    abouts: list[sampler_pb2.SampleResponse] = field(default_factory=list)
