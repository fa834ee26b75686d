"""Drives one rollout: does what the state machine asks for and reports what happened.

The instance of the environment is released however the episode ends. An error of the environment
is an outcome of the episode (`ENVIRONMENT_FAILED`); an error of the sampler is raised, because
there is no trajectory to speak of.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeAlias, TypeVar

from tinsmith.environments.chat_messages import (
    ObservationError,
    check_shown_tokens,
    read_action_kinds,
    read_stop,
    read_tokens,
)
from tinsmith.environments.environment import TEXT_ALONE, TOKENS_ALONE, Action
from tinsmith.errors import InvalidArgumentError
from tinsmith.images import ImageRules
from tinsmith.rollouts.chat import Continuation, Conversation
from tinsmith.rollouts.errors import (
    ActionParseError,
    InvalidTransitionError,
    SamplerFailedError,
)
from tinsmith.rollouts.interfaces import (
    ChatTokenizer,
    EnvironmentInstance,
    Observation,
    Sampler,
)
from tinsmith.rollouts.machine import (
    Cancelled,
    ContextBuilt,
    EnvironmentFailed,
    ParseFailed,
    Rollout,
    RolloutConfig,
    RolloutState,
    StepTaken,
    TurnSampled,
)
from tinsmith.rollouts.observations import (
    TokenPiece,
    check_observation,
    check_outcome,
    read_tools,
)
from tinsmith.rollouts.token_conversation import TokenConversation
from tinsmith.rollouts.tool_actions import ParseAction, tool_call_parser
from tinsmith.rollouts.trajectory import Trajectory
from tinsmith.sampling_stops import with_stop
from tinsmith.types import SamplingParams

logger = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 30.0
_LARGE_BYTES = 1 << 16
"""Text that is rendered and encoded beside the event loop, which other episodes share."""

Parameters = ParamSpec("Parameters")
Answer = TypeVar("Answer")
CreateInstance = Callable[[], Awaitable[EnvironmentInstance]]


@dataclass(frozen=True, slots=True)
class _Said:
    """A turn of the model, as text without its end and as it was sampled."""

    text: str = ""
    tokens: tuple[int, ...] = ()


ReadTurn = Callable[[_Said], str | Action]
"""Returns the action of a turn; raises `ActionParseError` where it holds none."""


class RolloutRunner:
    """Plays episodes with one sampler.

    Args:
        tokenizer: Of the sampler's model.
        sampler: Continues prompts.
        config: Limits of an episode.
        params: How tokens are drawn; `max_tokens` is set for each turn, and `seed`, if given, is
            mixed with the episode's and the turn's.
        parse_action: Turns the text of a turn into the action; raises `ActionParseError`. None: the
            text itself; where the environment has tools, its calls by the chat template's notation;
            where it steps on tokens alone, those that were sampled.
        images: How the model turns images into tokens, as `Client.list_models` tells it; None if it
            reads none.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer,
        sampler: Sampler,
        config: RolloutConfig | None = None,
        *,
        params: SamplingParams | None = None,
        parse_action: ParseAction | None = None,
        images: ImageRules | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sampler = sampler
        self._config = config or RolloutConfig()
        self._params = params or SamplingParams()
        self._parse_action = parse_action
        self._image_rules = images

    async def run(
        self,
        create_instance: CreateInstance,
        *,
        episode_key: str = "",
        should_stop: Callable[[], bool] = lambda: False,
    ) -> Trajectory:
        """Play one episode in a fresh instance.

        Args:
            create_instance: Creates and resets the instance; it is deleted here.
            episode_key: Tells this episode's random draws from those of others.
            should_stop: Asked between steps; ends the episode as cancelled.

        Raises:
            SamplerFailedError: If the sampler raised.
            TemplateRewritesHistoryError: If the chat template does and the config does not say
                what to do.
            ChatTemplateError: If the chat template cannot render the conversation.
        """
        rollout = Rollout(self._config)
        instance: EnvironmentInstance | None = None
        try:
            try:
                instance = await create_instance()
            except Exception as error:
                rollout.apply(EnvironmentFailed(_describe(error)))
                return rollout.to_trajectory(key=episode_key)
            conversation, read_turn = await self._begin(rollout, instance)
            said = _Said()
            while rollout.state is not RolloutState.TERMINATED:
                if should_stop():
                    rollout.apply(Cancelled("asked to stop"))
                elif rollout.state is RolloutState.GENERATING:
                    said = await self._generate(rollout, conversation, episode_key)
                else:
                    await self._interact(rollout, conversation, instance, read_turn, said)
            return rollout.to_trajectory(conversation.messages, key=episode_key)
        finally:
            if instance is not None:
                await _release(instance)

    async def _begin(
        self, rollout: Rollout, instance: EnvironmentInstance
    ) -> tuple[_Conversation, ReadTurn]:
        """Build the first context; return the conversation, and how its turns are read."""
        conversation: _Conversation = Conversation(
            self._tokenizer,
            split_turns=self._config.split_turns,
            append_only=self._config.append_only,
            images=self._image_rules,
        )
        try:
            first = instance.observation
            tokens, num_bytes = self._check(first)
            kinds = read_action_kinds(instance) if hasattr(instance, "action_kinds") else TEXT_ALONE
            if tokens:
                check_shown_tokens(tokens, kinds)
                conversation = TokenConversation(self._tokenizer)
            tools, stop = read_tools(first.tools), read_stop(first)
            context = await _aside(num_bytes, _begin_with, conversation, first, tokens, tools)
        except ObservationError as error:
            rollout.apply(EnvironmentFailed(_describe(error)))
            return conversation, _text_of
        rollout.apply(ContextBuilt(context.tokens, context.images, stop))
        if self._parse_action is not None:
            return conversation, _parsed_by(self._parse_action)
        if kinds == TOKENS_ALONE:
            return conversation, _tokens_of
        if tools:
            parser = tool_call_parser(self._tokenizer.tool_template, tools)
            return conversation, _parsed_by(parser)
        return conversation, _text_of

    def _check(self, shown: Observation) -> tuple[tuple[int, ...], int]:
        """Return the tokens that an observation shows, and about how long reading it takes."""
        tokens = read_tokens(shown)
        max_bytes = self._config.max_observation_bytes
        return tokens, check_observation(shown, tokens, max_bytes=max_bytes)

    async def _generate(
        self, rollout: Rollout, conversation: _Conversation, episode_key: str
    ) -> _Said:
        params = dataclasses.replace(
            with_stop(self._params, rollout.stop),
            max_tokens=rollout.turn_budget,
            seed=mix_seed(self._params.seed, episode_key, rollout.num_turns),
        )
        try:
            completion = await self._sampler.sample_async(rollout.context, params)
            rollout.apply(
                TurnSampled(
                    list(completion.tokens),
                    list(completion.logprobs),
                    list(completion.versions),
                    completion.stop_reason,
                )
            )
        except InvalidTransitionError as error:
            raise SamplerFailedError(
                f"the sampler returned a malformed completion: {error}"
            ) from error
        except InvalidArgumentError as error:
            # What else is refused is refused of every episode: it is no fault of this one.
            is_prompt = any(each.field.startswith("prompt") for each in error.field_violations)
            if not (is_prompt and conversation.may_be_refused):
                raise SamplerFailedError(f"the sampler failed: {_describe(error)}") from error
            # Only the sampler decodes pictures, and knows which tokens its model has.
            problem = f"the sampler refuses a prompt with what the environment showed: {error}"
            rollout.apply(EnvironmentFailed(problem))
            return _Said()
        except Exception as error:
            raise SamplerFailedError(f"the sampler failed: {_describe(error)}") from error
        text = conversation.add_turn(
            completion.tokens, completion.stop_reason, has_stops=bool(params.stop)
        )
        return _Said(text, tuple(completion.tokens))

    async def _interact(
        self,
        rollout: Rollout,
        conversation: _Conversation,
        instance: EnvironmentInstance,
        read_turn: ReadTurn,
        said: _Said,
    ) -> None:
        try:
            action = read_turn(said)
        except ActionParseError as error:
            rollout.apply(ParseFailed(str(error)))
            return
        try:
            outcome = await instance.step_async(action)
        except Exception as error:
            rollout.apply(EnvironmentFailed(_describe(error)))
            return
        continuation: Continuation | None = None
        stop: tuple[str | int, ...] = ()
        try:
            check_outcome(outcome)
            if not (outcome.done or rollout.is_last_turn):
                shown = outcome.observation
                tokens, num_bytes = self._check(shown)
                stop = read_stop(shown)
                continuation = await _aside(num_bytes, _go_on_with, conversation, shown, tokens)
        except ObservationError as error:
            rollout.apply(EnvironmentFailed(_describe(error)))
            return
        rollout.apply(
            StepTaken(float(outcome.reward), bool(outcome.done), outcome.info, continuation, stop)
        )


_Conversation: TypeAlias = Conversation | TokenConversation


def _begin_with(
    conversation: _Conversation,
    shown: Observation,
    tokens: Sequence[int],
    tools: Sequence[Mapping[str, Any]],
) -> TokenPiece:
    if isinstance(conversation, TokenConversation):
        return conversation.begin(tokens)
    return conversation.begin(shown.messages, images=shown.images, tools=tools)


def _go_on_with(
    conversation: _Conversation, shown: Observation, tokens: Sequence[int]
) -> Continuation:
    if isinstance(conversation, TokenConversation):
        return conversation.add_observation(tokens)
    if tokens:
        raise ObservationError("the episode began with messages, and now tokens are shown")
    return conversation.add_observation(shown.messages, images=shown.images)


def _text_of(said: _Said) -> str:
    return said.text


def _tokens_of(said: _Said) -> Action:
    return Action(tokens=said.tokens)


def _parsed_by(parse_action: ParseAction) -> ReadTurn:
    return lambda said: parse_action(said.text)


async def _aside(
    num_bytes: int,
    read: Callable[Parameters, Answer],
    *args: Parameters.args,
    **kwargs: Parameters.kwargs,
) -> Answer:
    if num_bytes < _LARGE_BYTES:
        return read(*args, **kwargs)
    return await asyncio.to_thread(read, *args, **kwargs)


def mix_seed(seed: int | None, episode_key: str, turn: int) -> int | None:
    """Return a seed of its own for each turn of each episode, the same in each run."""
    if seed is None:
        return None
    digest = hashlib.sha256(f"{seed}:{turn}:{episode_key}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


async def _release(instance: EnvironmentInstance) -> None:
    """Delete an instance; one that cannot be deleted expires on its own."""
    try:
        async with asyncio.timeout(_RELEASE_TIMEOUT_S):
            await instance.delete_async()
    except Exception as error:
        logger.warning("instance not deleted", extra={"error_type": type(error).__name__})


def _describe(error: BaseException) -> str:
    # Halves of surrogate pairs, as names of files may have them, have no place in a record.
    return f"{type(error).__name__}: {error}".encode(errors="replace").decode()
