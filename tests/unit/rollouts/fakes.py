from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tinsmith.environments.environment import Action
from tinsmith.types import ImageChunk, ModelInput, SampledSequence, SamplingParams

SPECIALS = ("<|im_start|>", "<|im_end|>", "<|eot|>")
_PIECES = re.compile("|".join(re.escape(s) for s in SPECIALS) + "|.", re.DOTALL)


class CharTokenizer:
    """Special tokens are 0..2, every other character is one token."""

    chat_template: str | None = "{{ messages }}"
    tool_template: str | None = None
    image_token_id: int | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        if add_special_tokens:
            raise AssertionError("a rollout never asks for extra tokens")
        return [
            SPECIALS.index(piece) if piece in SPECIALS else ord(piece) + 10
            for piece in _PIECES.findall(text)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(SPECIALS[t] if t < len(SPECIALS) else chr(t - 10) for t in tokens)

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        text = "".join(self.render_message(messages, i) for i in range(len(messages)))
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")

    def render_message(self, messages: Sequence[Mapping[str, Any]], index: int) -> str:
        role, content = messages[index]["role"], messages[index]["content"]
        return f"<|im_start|>{role}\n{content}<|im_end|>\n"


class TrimmingTokenizer(CharTokenizer):
    """Trims contents, as Llama 3 does."""

    def render_message(self, messages: Sequence[Mapping[str, Any]], index: int) -> str:
        message = messages[index]
        return f"<|im_start|>{message['role']}\n{message['content'].strip()}<|im_end|>\n"


class ThinkingTokenizer(CharTokenizer):
    """Hides the thoughts of all turns but the last, as Qwen3 does."""

    def render_message(self, messages: Sequence[Mapping[str, Any]], index: int) -> str:
        message = messages[index]
        content = message["content"]
        if message["role"] == "assistant" and index < len(messages) - 1:
            content = content.rpartition("</think>")[2]
        return f"<|im_start|>{message['role']}\n{content}<|im_end|>\n"


class SpacedTokenizer(CharTokenizer):
    """Writes a space before the end of an assistant's turn, as Llama 2 does."""

    def render_message(self, messages: Sequence[Mapping[str, Any]], index: int) -> str:
        message = messages[index]
        if message["role"] == "assistant":
            return f"{message['role']}: {message['content']} <|eot|>"
        return f"{message['role']}: {message['content']}\n"

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        text = "".join(self.render_message(messages, i) for i in range(len(messages)))
        return text + ("assistant: " if add_generation_prompt else "")


@dataclass
class FakeObservation:
    messages: list[dict[str, Any]] = field(default_factory=list)
    images: list[ImageChunk] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    stop: tuple[str | int, ...] = ()
    tokens: tuple[int, ...] = ()

    @classmethod
    def user(cls, content: str) -> FakeObservation:
        return cls([{"role": "user", "content": content}])


@dataclass
class FakeOutcome:
    observation: FakeObservation
    reward: float = 0.0
    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)


class FakeInstance:
    """Plays a script of outcomes; an exception in it is raised."""

    def __init__(self, first: str, outcomes: Sequence[FakeOutcome | Exception]) -> None:
        self.observation = FakeObservation.user(first)
        self.actions: list[str | Action] = []
        self.num_deletes = 0
        self.action_kinds = frozenset({"text"})
        self._outcomes = list(outcomes)

    async def step_async(self, action: str | Action) -> FakeOutcome:
        self.actions.append(action)
        outcome = self._outcomes[len(self.actions) - 1]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def delete_async(self) -> None:
        self.num_deletes += 1


class ScriptedSampler:
    """Answers with texts in turn; what ends in no special token and no stop was cut off."""

    def __init__(
        self, texts: Sequence[str | Exception], *, tokenizer: CharTokenizer, stops: str = ""
    ) -> None:
        self._stops = tokenizer.encode(stops, add_special_tokens=False)
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self._texts = list(texts)
        self._tokenizer = tokenizer

    async def sample_async(self, prompt: ModelInput, params: SamplingParams) -> SampledSequence:
        turn = len(self.prompts)
        self.prompts.append(prompt.to_ints())
        self.params.append(params)
        text = self._texts[turn]
        if isinstance(text, Exception):
            raise text
        tokens = self._tokenizer.encode(text, add_special_tokens=False)
        assert params.max_tokens is not None
        tokens = tokens[: params.max_tokens]
        stopped = tokens[-1] < len(SPECIALS) or tokens[-1] in self._stops
        return SampledSequence(
            tokens=tokens,
            logprobs=[-(turn + 1) - i / 16 for i in range(len(tokens))],
            versions=[turn + 3] * len(tokens),
            stop_reason="stop" if stopped else "length",
        )


async def ready(instance: FakeInstance) -> FakeInstance:
    return instance


def creating(instance: FakeInstance) -> Callable[[], Any]:
    return lambda: ready(instance)
