"""`POST /v1/chat/completions`; tools are refused where the template has no notation for them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from tinsmith.text.cut_calls import read_cut_calls
from tinsmith.text.tool_notations import Piece, ToolCall, ToolFormat, detect_format
from tinsmith.v1 import sampler_pb2, trajectories_pb2
from tinsmith_gateway.endpoint import Call
from tinsmith_gateway.openai import codec
from tinsmith_gateway.openai.answered_by import AnsweredBy
from tinsmith_gateway.openai.bodies import ChatBody
from tinsmith_gateway.openai.codec import Sampled
from tinsmith_gateway.openai.model_calls import Answered, ModelCalls, Target
from tinsmith_gateway.openai.rendering import Conversation, Prompt, render
from tinsmith_gateway.openai.requests import call_id_of
from tinsmith_gateway.openai.streaming import begin_stream, until_disconnect
from tinsmith_gateway.openai.text.completion_text import Answer, chat_logprobs
from tinsmith_gateway.openai.usage import usage_of
from tinsmith_runtime.errors import InvalidFieldError


async def chat_completion(calls: ModelCalls, call: Call) -> Response:
    """Answer a conversation."""
    body = await call.parse(ChatBody)
    body.check_offered()
    completion = ChatCompletion(calls, call, body)
    if body.stream:
        return await begin_stream(call, completion.chunks(), completion.answered_by)
    content = await until_disconnect(call.request, completion.whole())
    return JSONResponse(content, headers=completion.answered_by.headers)


class ChatCompletion:
    """One answer to a conversation.

    Args:
        calls: Samples.
        call: The request.
        body: What it asks for, checked.
        shows_cut_calls: Whether a forced call that is cut at the limit is a call with half its
            arguments, as OpenAI has it; else it is text.
    """

    def __init__(
        self, calls: ModelCalls, call: Call, body: ChatBody, *, shows_cut_calls: bool = True
    ) -> None:
        self._calls = calls
        self._credential = call.credential
        self._admission = call.admission
        # Pictures stand in the body as text, and become no tokens of text.
        self._num_text = len(call.body) - sum(each.num_of_pictures for each in body.messages)
        self._body = body
        self._shows_cut_calls = shows_cut_calls
        self._call_id = call_id_of(call)
        self.answered_by = AnsweredBy()
        """Which sampler it was."""
        self.num_prompt = 0
        """Tokens of the prompt, once it is rendered."""
        self.num_cached = 0
        """Those of them that the sampler had in its cache, once it has begun."""
        self.stop_string: str | None = None
        """Which stop string ended the first sample."""
        self.id = self._call_id.hex
        """Of the call."""
        self.model = body.model or _episode_model(call)
        """As the request names it, or the episode."""
        self._head = {
            "id": f"chatcmpl-{self.id}",
            "created": int(time.time()),
            "model": self.model,
        }

    async def prepare(self) -> Prompt:
        """Return the prompt, and draw nothing."""
        async with self._calls.target(self._credential, self._body.model) as target:
            prompt, _ = await self._prepare(target, self._tool_format(target))
            return prompt

    async def whole(self) -> dict[str, Any]:
        """Return the completion once it is drawn."""
        async with self._calls.target(self._credential, self._body.model) as target:
            tool_format = self._tool_format(target)
            prompt, request = await self._prepare(target, tool_format)
            answered = await self._calls.sample(target, request)
            self._note(answered.about_prompt)
            await self._calls.record(target, self._call_id, prompt, request, answered.samples)
            choices = await self._calls.aside(
                target, self._choices, target, tool_format, prompt, answered
            )
            return {
                **self._head,
                "object": "chat.completion",
                "choices": choices,
                "usage": usage_of([prompt], answered.samples, [answered.about_prompt]),
                **self._exact_prompt(prompt),
            }

    async def chunks(self) -> AsyncGenerator[dict[str, Any]]:
        """Yield the completion as it is drawn."""
        async with self._calls.target(self._credential, self._body.model) as target:
            tool_format = self._tool_format(target)
            prompt, request = await self._prepare(target, tool_format)
            answers = [self._answer(target, tool_format) for _ in range(request.num_samples)]
            num_calls = [0] * len(answers)
            begun: set[int] = set()
            about = sampler_pb2.SampleResponse()
            last = []
            async for piece in self._calls.stream(target, request):
                about = piece.about_prompt or about
                self._note(about)
                answer, index = answers[piece.index], piece.index
                extra = self._exact(piece.sampled)
                if index not in begun:
                    begun.add(index)
                    start = {"role": "assistant", "content": "", "refusal": None}
                    yield self._chunk(index, start, extra=self._exact_prompt(prompt))
                deltas = []
                for part in await target.tokenizer.quickly(answer.push, piece.sampled):
                    deltas.append(_delta(part, num_calls[index], tool_format))
                    num_calls[index] += not isinstance(part, str)
                # Tokens and their scores go out at once, even where their text is held back.
                logprobs = await target.tokenizer.quickly(self._logprobs, piece.sampled, target)
                if not deltas and (logprobs or extra):
                    deltas.append({})
                for number, delta in enumerate(deltas):
                    is_first = number == 0
                    yield self._chunk(
                        index,
                        delta,
                        logprobs=logprobs if is_first else None,
                        extra=extra if is_first else {},
                    )
                if answer.finish_reason:
                    if index == 0:
                        self.stop_string = answer.stop_string
                    last.append(self._chunk(index, {}, finish_reason=answer.finish_reason))
                    if len(last) < len(answers):
                        yield last[-1]
            samples = [answer.sampled for answer in answers]
            await self._calls.record(target, self._call_id, prompt, request, samples)
            # A client that has seen every sample end takes the answer for complete.
            yield last[-1]
            if self._body.wants_usage:
                yield {
                    **self._head,
                    "object": "chat.completion.chunk",
                    "choices": [],
                    "usage": usage_of([prompt], samples, [about]),
                }

    def _note(self, about: sampler_pb2.SampleResponse) -> None:
        self.answered_by.note(about)
        self.num_cached = about.num_cached_prompt_tokens

    async def _prepare(
        self, target: Target, tool_format: ToolFormat | None
    ) -> tuple[Prompt, sampler_pb2.SampleRequest]:
        body = self._body
        add_generation_prompt = body.add_generation_prompt
        conversation = Conversation(
            messages=[message.to_mapping() for message in body.messages],
            tools=body.shown_tools,
            add_generation_prompt=(
                not body.continue_final_message
                if add_generation_prompt is None
                else add_generation_prompt
            ),
            continue_final_message=body.continue_final_message,
            variables=body.chat_template_kwargs,
        )
        prompt = await self._calls.aside(
            target, render, conversation, target.tokenizer, num_text=self._num_text
        )
        self.num_prompt = len(prompt.tokens)
        self._admission.add_tokens(self.num_prompt)
        params = codec.encode_params(
            body,
            max_tokens=body.max_completion_tokens or body.max_tokens,
            seed=codec.seed_of(body, self._call_id),
            output_format=self._output_format(tool_format),
        )
        return prompt, codec.encode_request(
            prompt,
            params,
            num_samples=body.num_samples,
            num_top=body.top_logprobs or 0,
            is_live=target.handle.is_live,
        )

    def _choices(
        self, target: Target, tool_format: ToolFormat | None, prompt: Prompt, answered: Answered
    ) -> list[dict[str, Any]]:
        """Return the samples as they are read. Takes seconds for many: not for the event loop."""
        choices = []
        for index, sampled in enumerate(answered.samples):
            answer = self._answer(target, tool_format)
            pieces = answer.push(sampled)
            if index == 0:
                self.stop_string = answer.stop_string
            choices.append(
                {
                    "index": index,
                    "message": _message(pieces, tool_format),
                    "finish_reason": answer.finish_reason,
                    "logprobs": self._logprobs(sampled, target),
                    **self._exact(sampled),
                    **self._exact_prompt(prompt),
                }
            )
        return choices

    def _tool_format(self, target: Target) -> ToolFormat | None:
        if not self._body.shown_tools:
            return None
        tool_format = detect_format(target.tokenizer.tool_template or "")
        if tool_format is None:
            raise InvalidFieldError(
                "tools", "are not offered: the model's chat template has no convention for them"
            )
        return tool_format

    def _output_format(
        self, tool_format: ToolFormat | None
    ) -> trajectories_pb2.OutputFormat | None:
        rules, answer = self._body.tool_rules, self._body.output_format
        if tool_format is None or rules is None:
            return answer
        return codec.encode_tool_form(tool_format.notation, rules, answer)

    def _answer(self, target: Target, tool_format: ToolFormat | None) -> Answer:
        names = [tool.function.name for tool in self._body.tools or ()]
        return Answer(
            target.tokenizer,
            stops=self._body.stops,
            min_tokens=self._body.min_tokens or 0,
            skip_special=self._body.skip_special_tokens,
            kept_tokens=tool_format.kept_tokens if tool_format else (),
            parser=tool_format.new_parser(names) if tool_format else None,
            read_cut=self._cut_reader(tool_format),
        )

    def _cut_reader(self, tool_format: ToolFormat | None) -> Callable[[str], list[ToolCall]] | None:
        rules = self._body.tool_rules
        if tool_format is None or rules is None or not rules.must_call:
            return None
        if not self._shows_cut_calls:
            return None
        notation, names = tool_format.notation, list(rules.schemas)
        return lambda text: read_cut_calls(text, notation, names)

    def _logprobs(self, piece: Sampled, target: Target) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(piece, target.tokenizer, num_top=self._body.top_logprobs or 0)

    def _exact(self, piece: Sampled) -> dict[str, Any]:
        if not self._body.return_token_ids:
            return {}
        return {"token_ids": piece.tokens, "versions": piece.versions}

    def _exact_prompt(self, prompt: Prompt) -> dict[str, Any]:
        return {"prompt_token_ids": list(prompt.tokens)} if self._body.return_token_ids else {}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
        extra: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            **(extra or {}),
        }
        usage = {"usage": None} if self._body.wants_usage else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **usage}


def _message(pieces: Sequence[Piece], tool_format: ToolFormat | None) -> dict[str, Any]:
    text = "".join(piece for piece in pieces if isinstance(piece, str))
    calls = [piece for piece in pieces if not isinstance(piece, str)]
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if calls and tool_format is not None:
        message["content"] = text or None
        message["tool_calls"] = [
            {
                "id": tool_format.new_id(),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in calls
        ]
    return message


def _delta(piece: Piece, number: int, tool_format: ToolFormat | None) -> dict[str, Any]:
    if isinstance(piece, str) or tool_format is None:
        return {"content": piece}
    return {
        "tool_calls": [
            {
                "index": number,
                "id": tool_format.new_id(),
                "type": "function",
                "function": {"name": piece.name, "arguments": piece.arguments},
            }
        ]
    }


def _episode_model(call: Call) -> str:
    episode = call.credential.episode
    return "" if episode is None else episode.model
