"""What a rollout needs of a tokenizer, a sampler and an environment.

Small protocols. The same state machine runs against the service (`adapters`), an engine in the same
process, or a few lines in a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tinsmith.environments.environment import Action
from tinsmith.types import ImageChunk, ModelInput, SamplingParams

Message = Mapping[str, Any]
"""One message of a conversation, as chat templates read it.

`role` and `content`; a content is a text, or a list of texts and places of images
(`{"type": "image"}`). An assistant's message may hold `tool_calls`, a tool's a `tool_call_id`.
"""


class ChatTokenizer(Protocol):
    """Text to tokens and conversations to text; `tinsmith.Tokenizer` is one."""

    @property
    def chat_template(self) -> str | None:
        """The source of the chat template; None if the model has none."""
        ...

    @property
    def tool_template(self) -> str | None:
        """The source of the template of conversations with tools; None if the model has none."""
        ...

    @property
    def image_token_id(self) -> int | None:
        """The token that the template writes for an image; None if it writes none."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the tokens of a text; special tokens written in it become one token each."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        ...

    def render_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = ...,
        tools: Sequence[Mapping[str, Any]] | None = ...,
    ) -> str:
        """Return a conversation as the text that the model reads."""
        ...


class Completion(Protocol):
    """One completion, exactly as it was sampled; `tinsmith.types.SampledSequence` is one."""

    @property
    def tokens(self) -> Sequence[int]:
        """Sampled tokens, stop token included."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """Natural-log probability of each token."""
        ...

    @property
    def versions(self) -> Sequence[int]:
        """Version of the weights that produced each token."""
        ...

    @property
    def stop_reason(self) -> str:
        """`stop` or `length`."""
        ...


class Sampler(Protocol):
    """Continues a prompt."""

    async def sample_async(self, prompt: ModelInput, params: SamplingParams, /) -> Completion:
        """Return one completion."""
        ...


class Observation(Protocol):
    """What an environment shows next; `tinsmith.Observation` is one.

    It may have `stop` as well, where the next action ends: strings and token ids. It may have
    `tokens`, which follow the prompt as they are, in place of messages, images and tools.
    """

    @property
    def messages(self) -> Sequence[Message]:
        """Messages to append to the conversation."""
        ...

    @property
    def images(self) -> Sequence[ImageChunk]:
        """Images of the messages, in the order of their places."""
        ...

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Schemas of the tools of the episode; read of its first observation only."""
        ...


class StepOutcome(Protocol):
    """What one action led to; `tinsmith.StepResult` is one."""

    @property
    def observation(self) -> Observation:
        """What the environment shows next."""
        ...

    @property
    def reward(self) -> float:
        """Reward of the step."""
        ...

    @property
    def done(self) -> bool:
        """Whether the episode is over."""
        ...

    @property
    def info(self) -> Mapping[str, Any]:
        """Further facts."""
        ...


class EnvironmentInstance(Protocol):
    """One play of an environment, reset and waiting for its first action.

    It may have `action_kinds` as well; without them it steps on text.
    """

    @property
    def observation(self) -> Observation:
        """What the environment shows at the start."""
        ...

    async def step_async(self, action: str | Action, /) -> StepOutcome:
        """Apply an action; whatever it raises means that the episode is lost.

        Args:
            action: The text of the turn. Where the environment has tools, steps on tokens alone,
                or a `parse_action` returns one, an `Action`.
        """
        ...

    async def delete_async(self) -> None:
        """Release the instance."""
        ...
