"""A script in the place of a model: it says its turns in the tokens that a model would say them in.

Rollouts of it are what a warm start imitates. They are built as the model's own are, so that what
is imitated has exactly the form of what is sampled later.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from tinsmith.rollouts.interfaces import ChatTokenizer, Completion
from tinsmith.types import ModelInput, SampledSequence, SamplingParams


class ScriptedSampler:
    """Says what a script chooses, whatever the prompt.

    Args:
        tokenizer: Of the model that is to imitate it.
        choose_turn: Returns the text of the next turn.
        end: Tokens with which the model's turns end.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        choose_turn: Callable[[], Awaitable[str]],
        end: Sequence[int],
    ) -> None:
        self._tokenizer = tokenizer
        self._choose_turn = choose_turn
        self._end = tuple(end)

    async def sample_async(self, prompt: ModelInput, params: SamplingParams) -> Completion:
        """Return the next turn; see `Sampler`.

        Raises:
            ValueError: If the turn is longer than a turn of the model may be.
        """
        del prompt
        text = await self._choose_turn()
        tokens = [*self._tokenizer.encode(text, add_special_tokens=False), *self._end]
        if params.max_tokens is not None and len(tokens) > params.max_tokens:
            raise ValueError(
                f"the script says {text!r}, which takes {len(tokens)} tokens, and max_tokens is "
                f"{params.max_tokens}; raise max_tokens"
            )
        # A script has no chances to report; what is imitated is trained on by its tokens alone.
        return SampledSequence(
            tokens=tokens,
            logprobs=[0.0] * len(tokens),
            versions=[0] * len(tokens),
            stop_reason="stop",
        )
