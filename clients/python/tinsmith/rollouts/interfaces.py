"""What a rollout needs of a tokenizer, a sampler and an environment.

Small protocols. The same state machine runs against the service (`adapters`), an engine in the same
process, or a few lines in a test.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tinsmith.types import SamplingParams

Message = Mapping[str, str]
"""One message of a conversation, with `role` and `content`."""


class ChatTokenizer(Protocol):
    """Text to tokens and conversations to text; `tinsmith.Tokenizer` is one."""

    def encode(self, text: str, *, add_special_tokens: bool = ...) -> list[int]:
        """Return the tokens of a text; special tokens written in it become one token each."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        ...

    def render_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = ...
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

    async def sample_async(
        self, prompt_tokens: Sequence[int], params: SamplingParams
    ) -> Completion:
        """Return one completion."""
        ...


class Observation(Protocol):
    """What an environment shows next; `tinsmith.Observation` is one."""

    @property
    def messages(self) -> Sequence[Message]:
        """Messages to append to the conversation."""
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
    """One play of an environment, reset and waiting for its first action."""

    @property
    def observation(self) -> Observation:
        """What the environment shows at the start."""
        ...

    async def step_async(self, text: str) -> StepOutcome:
        """Apply an action; whatever it raises means that the episode is lost."""
        ...

    async def delete_async(self) -> None:
        """Release the instance."""
        ...
