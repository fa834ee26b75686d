"""A record against the same episode played once more: where the tokens part, and what may differ.

Equal weights, contexts and seeds give equal tokens. Whether that holds to the last bit is what the
server says of itself: `exact`. What is not kept cannot be played again: draws without a seed, turns
of remote agents, and images of an environment that only the recipe had.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tinsmith.errors import ConfigurationError
from tinsmith.rollouts.interfaces import Sampler
from tinsmith.rollouts.machine import RolloutConfig
from tinsmith.rollouts.records.record import AGENT, PROBLEM, EpisodeRecord
from tinsmith.rollouts.runner import mix_seed
from tinsmith.rollouts.trajectory import Trajectory
from tinsmith.sampling_stops import with_stop
from tinsmith.types import ModelInput, SamplingParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Replay:
    """What came of playing an episode again.

    Attributes:
        num_tokens: Tokens of the record.
        first_difference: Index of the first token that differs; None if all are the same.
        recorded: The token of the record there; None if it had ended.
        replayed: The token that was played there; None if it had ended.
        num_logprobs: Sampled tokens whose log-probability has other bits.
        max_gap: Largest difference of two log-probabilities.
        versions: Weights that sampled the record, oldest and newest.
        replayed_versions: Weights that sampled the replay.
        reward: What the replay earned; None where only turns were sampled.
    """

    num_tokens: int
    first_difference: int | None
    recorded: int | None
    replayed: int | None
    num_logprobs: int
    max_gap: float
    versions: tuple[int, int] | None
    replayed_versions: tuple[int, int] | None
    reward: float | None = None

    @property
    def is_same(self) -> bool:
        """Whether all tokens are the same."""
        return self.first_difference is None

    @property
    def is_bit_equal(self) -> bool:
        """Whether tokens and log-probabilities have the same bits."""
        return self.is_same and not self.num_logprobs


@dataclass(frozen=True, slots=True)
class Played:
    """The columns of an episode that was played again."""

    tokens: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    reward: float | None = None


def columns_of(trajectory: Trajectory) -> Played:
    """Return the columns of an episode; of several samples, one after the other."""
    samples = trajectory.samples
    return Played(
        [int(token) for sample in samples for token in sample.tokens],
        [int(each) for sample in samples for each in sample.loss_mask],
        [float(value) for sample in samples for value in sample.logprobs],
        [int(version) for sample in samples for version in sample.versions],
        trajectory.reward,
    )


def compare(record: EpisodeRecord, played: Played) -> Replay:
    """Return where a replay leaves its record."""
    pairs = enumerate(zip(record.tokens, played.tokens, strict=False))
    shorter = min(len(record.tokens), len(played.tokens))
    first = next((index for index, (a, b) in pairs if a != b), None)
    if first is None and len(record.tokens) != len(played.tokens):
        first = shorter
    end = shorter if first is None else first
    before = np.asarray(record.logprobs[:end], dtype=np.float32)
    after = np.asarray(played.logprobs[:end], dtype=np.float32)
    gaps = np.abs(before - after)
    return Replay(
        num_tokens=len(record.tokens),
        first_difference=first,
        recorded=_at(record.tokens, first),
        replayed=_at(played.tokens, first),
        num_logprobs=int((before.view(np.int32) != after.view(np.int32)).sum()),
        max_gap=float(gaps.max()) if gaps.size else 0.0,
        versions=version_range(record.versions, record.mask),
        replayed_versions=version_range(played.versions, played.mask),
        reward=played.reward,
    )


def check_replayable(record: EpisodeRecord) -> None:
    """Refuse an episode that cannot be played again.

    Raises:
        ConfigurationError: If it is so; says why.
    """
    origin = record.origin
    if origin.kind == AGENT:
        raise ConfigurationError(
            f"the episode {record.episode} was played by a remote agent, which keeps no seeds",
            remedy="replay episodes of recipes and of served environments",
        )
    if origin.sampling.get("seed") is None and origin.sampling.get("temperature") != 0:
        raise ConfigurationError(
            f"the episode {record.episode} was drawn without a seed",
            remedy="give SamplingParams(seed=...) where episodes are played",
        )


def sampling_params(record: EpisodeRecord) -> SamplingParams:
    """Return how the tokens of an episode were drawn.

    Raises:
        ConfigurationError: If a field is unknown.
    """
    values = dict(record.origin.sampling)
    if "logit_bias" in values:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    return _build(SamplingParams, values, "sampling")


def rollout_config(record: EpisodeRecord) -> RolloutConfig:
    """Return the limits of an episode.

    Raises:
        ConfigurationError: If a field is unknown or out of range.
    """
    return _build(RolloutConfig, record.origin.limits, "limits")


async def sample_turns(record: EpisodeRecord, sampler: Sampler) -> Played:
    """Sample the turns of an episode again, each from the context that the record has.

    Args:
        record: The episode; without images, whose bytes are not kept.
        sampler: Of the same weights.

    Raises:
        ConfigurationError: If the record holds images.
    """
    if record.images:
        raise ConfigurationError(
            f"the episode {record.episode} shows images, which are kept by digest alone",
            remedy="replay episodes of served environments, which show them again",
        )
    params = sampling_params(record)
    config = rollout_config(record)
    tokens: list[int] = list(record.tokens)
    logprobs = list(record.logprobs)
    versions = list(record.versions)
    num_sampled = 0
    for number, turn in enumerate(record.turns):
        begin = record.turn_indices.index(number)
        start = max(each for each in record.sample_starts if each <= begin)
        context = tokens[start:begin]
        if record.origin.kind != PROBLEM:
            budget = min(
                config.max_tokens_per_turn,
                config.max_tokens - num_sampled,
                config.max_context_tokens - len(context),
            )
            seed = mix_seed(params.seed, record.episode, number)
            turn_params = dataclasses.replace(
                with_stop(params, turn.stop), max_tokens=budget, seed=seed
            )
        else:
            turn_params = params
        said = await sampler.sample_async(ModelInput.from_ints(context), turn_params)
        num_sampled += turn.num_tokens
        end = begin + turn.num_tokens
        if list(said.tokens) != tokens[begin:end]:
            # What follows was said to another turn.
            return Played(
                [*tokens[:begin], *said.tokens],
                [*record.mask[:begin], *[1] * len(said.tokens)],
                [*logprobs[:begin], *said.logprobs],
                [*versions[:begin], *said.versions],
            )
        logprobs[begin:end] = said.logprobs
        versions[begin:end] = said.versions
    return Played(tokens, record.mask, logprobs, versions)


def _build(kind: Callable[..., T], values: Mapping[str, Any], field: str) -> T:
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"{field} of the record is refused: {error}", remedy="replay with the same release"
        ) from error


def _at(tokens: Sequence[int], index: int | None) -> int | None:
    return None if index is None or index >= len(tokens) else int(tokens[index])


def version_range(versions: Sequence[int], mask: Sequence[int]) -> tuple[int, int] | None:
    """Return the oldest and the newest version that sampled a token; None if none was sampled."""
    found = [version for version, trained in zip(versions, mask, strict=True) if trained]
    return (min(found), max(found)) if found else None
