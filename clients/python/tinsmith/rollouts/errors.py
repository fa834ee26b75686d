"""What can go wrong in a rollout that is not an outcome of the episode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinsmith.errors import TinsmithError


class RolloutError(TinsmithError):
    """Base of the errors of rollouts, which arise in the client: `reason` is empty."""


class InvalidTransitionError(RolloutError):
    """An event arrived in a state that does not know it: a bug of the driver."""


class ActionParseError(RolloutError):
    """The text of a turn holds no action; raised by a `parse_action` function."""


class SamplerFailedError(RolloutError):
    """The sampler raised, or returned a malformed completion; `__cause__` says what."""


class TemplateRewritesHistoryError(RolloutError):
    """The chat template renders earlier turns differently once a later one is appended.

    The tokens that the model saw are then no prefix of what the template renders. As one sequence,
    the trajectory would train on a context that never was.
    """

    def __init__(self, num_turns: int, position: int) -> None:
        super().__init__(
            f"the chat template rewrites its own history after turn {num_turns} (from character "
            f"{position} of the rendered text), so the turns of an episode are not one sequence. "
            "Set RolloutConfig(split_turns=True) to train one sample for each turn, or "
            "append_only=True to keep the tokens as they were sampled and ignore the rewriting; in "
            "a recipe, history=split or history=append"
        )
        self.num_turns = num_turns
        self.position = position


class ChatTemplateError(RolloutError):
    """The chat template cannot render the conversation, or drops the assistant's words."""


class NoRolloutsError(RolloutError):
    """Not one group of a batch survived; the message holds the reasons.

    Args:
        unused: What was played, as `GroupResult.unused`.
    """

    def __init__(self, message: str, unused: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.unused = tuple(unused)
