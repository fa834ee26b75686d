"""A policy as an opponent: it plays a game by the same conversation as the learner.

Its tokens are not trained on. What it reads is built as in a rollout, so a checkpoint plays as an
opponent exactly as it played when it was the learner.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tinsmith.environments.chat_messages import ObservationError, read_stop, read_tokens
from tinsmith.games.agent_game import AgentGame
from tinsmith.images import ImageRules
from tinsmith.rollouts.chat import Conversation
from tinsmith.rollouts.interfaces import ChatTokenizer, Sampler
from tinsmith.rollouts.runner import mix_seed
from tinsmith.rollouts.trajectory import PlacedImage, to_model_input
from tinsmith.sampling_stops import with_stop
from tinsmith.types import SamplingParams


class PolicyPlayer:
    """One seat of one game, played by a sampler; take a new one for the next game.

    Args:
        tokenizer: Of the sampler's model.
        sampler: Continues prompts.
        params: How tokens are drawn; `seed`, if given, is mixed with the game's key and the turn.
        game_key: Tells this game's random draws from those of others.
        images: How the model turns images into tokens; None if it reads none.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        sampler: Sampler,
        params: SamplingParams | None = None,
        *,
        game_key: str = "",
        images: ImageRules | None = None,
    ) -> None:
        self._conversation = Conversation(tokenizer, append_only=True, images=images)
        self._sampler = sampler
        self._params = params or SamplingParams()
        self._game_key = game_key
        self._context: list[int] = []
        self._images: list[PlacedImage] = []
        self._num_turns = 0

    async def choose_move(self, game: AgentGame, agent: str) -> Any:
        """Return the text of the policy's next turn.

        Raises:
            ObservationError: If the game shows tokens, or no observation.
            TinsmithError: If the sampler fails.
            ChatTemplateError: If the chat template cannot render the conversation.
        """
        shown = game.observe(agent)
        if read_tokens(shown):
            raise ObservationError("a game shows messages, and this one shows tokens")
        piece = (
            self._conversation.add_observation(shown.messages, images=shown.images)
            if self._num_turns
            else self._conversation.begin(shown.messages, images=shown.images)
        )
        self._images += [placed.moved(len(self._context)) for placed in piece.images]
        self._context += piece.tokens
        params = dataclasses.replace(
            with_stop(self._params, read_stop(shown)),
            seed=mix_seed(self._params.seed, self._game_key, self._num_turns),
        )
        completion = await self._sampler.sample_async(
            to_model_input(self._context, self._images), params
        )
        self._num_turns += 1
        self._context += completion.tokens
        return self._conversation.add_turn(
            completion.tokens, completion.stop_reason, has_stops=bool(params.stop)
        )
