"""A conversation in tokens alone: what the environment shows follows the turn as it is.

It is for environments that show tokens; `chat` is for messages and images.

There is no template, so nothing is rendered and no history can be rewritten. The end of a turn is a
token like others; where it belongs in the context, the model sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinsmith.environments.chat_messages import ObservationError
from tinsmith.rollouts.chat import Continuation
from tinsmith.rollouts.interfaces import ChatTokenizer
from tinsmith.rollouts.observations import TokenPiece


class TokenConversation:
    """The conversation of an environment that shows tokens and steps on tokens.

    Args:
        tokenizer: Says in records what the tokens are as text.
    """

    may_be_refused = True
    """A sampler refuses tokens that its model lacks."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self._tokenizer = tokenizer
        self._messages: list[dict[str, Any]] = []

    @property
    def messages(self) -> tuple[Mapping[str, Any], ...]:
        """The conversation as decoded text: the environment's is the user's."""
        return tuple(self._messages)

    def begin(self, tokens: Sequence[int]) -> TokenPiece:
        """Return the context of the first turn.

        Raises:
            ObservationError: If the tokenizer lacks one of them.
        """
        return TokenPiece(self._shown(tokens))

    def add_turn(self, tokens: Sequence[int], stop_reason: str, *, has_stops: bool = False) -> str:
        """Append the model's turn and return its text, end included."""
        del stop_reason, has_stops
        text = self._tokenizer.decode(list(tokens))
        self._messages.append({"role": "assistant", "content": text})
        return text

    def add_observation(self, tokens: Sequence[int]) -> Continuation:
        """Append what the environment showed and return the tokens that follow the turn.

        Raises:
            ObservationError: If there are none, or the tokenizer lacks one of them.
        """
        if not tokens:
            raise ObservationError("the episode began with tokens, and now messages are shown")
        return Continuation(self._shown(tokens))

    def _shown(self, tokens: Sequence[int]) -> tuple[int, ...]:
        try:
            text = self._tokenizer.decode(list(tokens))
        except Exception as error:
            # What a tokenizer does with a token that it lacks is its own affair.
            raise ObservationError(f"the tokenizer cannot read the tokens: {error}") from error
        self._messages.append({"role": "user", "content": text})
        return tuple(tokens)
