"""Trajectories to records: the exact columns, and the text of each token."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tinsmith.environments.plain_values import to_plain
from tinsmith.images import image_size
from tinsmith.rollouts.groups import GroupResult
from tinsmith.rollouts.machine import RolloutConfig
from tinsmith.rollouts.records.record import (
    EpisodeRecord,
    Origin,
    RecordedImage,
    RecordedTurn,
)
from tinsmith.rollouts.trajectory import PlacedImage, Trajectory
from tinsmith.types import SamplingParams

_DIGITS = 9
"""Decimal digits that name a float32 exactly."""


class Decoder(Protocol):
    """Tokens to text; `tinsmith.Tokenizer` is one."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        ...


class Weights(Protocol):
    """What a sampler says of its weights; `tinsmith.Sampler` is one."""

    @property
    def base_model(self) -> str: ...  # noqa: D102
    @property
    def checkpoint(self) -> str: ...  # noqa: D102
    @property
    def run(self) -> str: ...  # noqa: D102


def make_origin(
    weights: Weights, params: SamplingParams, config: RolloutConfig | None = None, **facts: Any
) -> Origin:
    """Return how episodes are played.

    Args:
        weights: The sampler.
        params: How tokens are drawn.
        config: Limits of an episode; None where they do not apply.
        **facts: Further fields of `Origin`.
    """
    return Origin(
        base_model=weights.base_model,
        checkpoint=weights.checkpoint,
        run=weights.run,
        sampling=_changed(params),
        limits={} if config is None else dataclasses.asdict(config),
        **facts,
    )


def make_record(
    trajectory: Trajectory,
    origin: Origin,
    *,
    advantage: float | Sequence[float] | None,
    decoder: Decoder,
    is_used: bool = True,
) -> EpisodeRecord:
    """Return the record of an episode.

    Args:
        trajectory: The episode.
        origin: How it was played.
        advantage: Of the whole episode, or of each turn; None if none was computed.
        decoder: Says what each token is as text.
        is_used: Whether it is in a group.
    """
    samples = trajectory.samples
    starts = [0, *itertools.accumulate(len(sample.tokens) for sample in samples)][:-1]
    turn_indices = [int(turn) for sample in samples for turn in sample.turn_indices]
    tokens = [int(token) for sample in samples for token in sample.tokens]
    return EpisodeRecord(
        episode=trajectory.key,
        origin=origin,
        reason=trajectory.reason.value,
        failure=trajectory.failure,
        is_used=is_used,
        turns=tuple(
            RecordedTurn(
                num_tokens=turn.num_tokens,
                stop_reason=turn.stop_reason,
                reward=turn.reward,
                info=to_plain(turn.info),
                stop=turn.stop,
            )
            for turn in trajectory.turns
        ),
        advantage=float(advantage) if isinstance(advantage, int | float) else None,
        tokens=tokens,
        texts=token_texts(tokens, decoder),
        mask=[int(turn >= 0) for turn in turn_indices],
        logprobs=[shortest(value) for sample in samples for value in sample.logprobs],
        advantages=[_advantage_of(turn, advantage) for turn in turn_indices],
        versions=[int(version) for sample in samples for version in sample.versions],
        turn_indices=turn_indices,
        sample_starts=tuple(starts),
        images=tuple(
            _image(placed.moved(start))
            for sample, start in zip(samples, starts, strict=True)
            for placed in sample.images
        ),
        messages=tuple(to_plain(message) for message in trajectory.messages),
    )


def record_result(
    result: GroupResult[Any],
    decoder: Decoder,
    origin_of: Callable[[Any], Origin],
) -> Iterator[EpisodeRecord]:
    """Yield the records of all episodes of groups, group by group, and then of the plays in none.

    Args:
        result: The groups.
        decoder: Says what each token is as text.
        origin_of: Returns how the episodes of a task were played.
    """
    for group in result.groups:
        origin = origin_of(group.task)
        for trajectory, advantage in zip(group.trajectories, group.advantages, strict=True):
            yield make_record(trajectory, origin, advantage=advantage, decoder=decoder)
    for play in result.unused:
        yield make_record(
            play.trajectory,
            origin_of(play.task),
            advantage=None,
            decoder=decoder,
            is_used=False,
        )


def shortest(value: float) -> float:
    """Return the number of fewest digits that reads as the same float32."""
    return float(f"{np.float32(value):.{_DIGITS}g}")


def _advantage_of(turn: int, advantage: float | Sequence[float] | None) -> float:
    if turn < 0 or advantage is None:
        return 0.0
    return shortest(advantage if isinstance(advantage, int | float) else advantage[turn])


def _changed(params: SamplingParams) -> dict[str, Any]:
    """Return the fields that differ from the defaults, and how warm the draws were."""
    given = dataclasses.asdict(params)
    plain = {name: value for name, value in given.items() if value != _DEFAULTS[name]}
    if params.logit_bias:
        plain["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()}
    found: Mapping[str, Any] = to_plain({"temperature": params.temperature, **plain})
    return dict(found)


_PARTIAL = "\N{REPLACEMENT CHARACTER}"
_MAX_PARTS = 4
"""Bytes of the longest character in UTF-8."""
_DEFAULTS = dataclasses.asdict(SamplingParams())


def token_texts(tokens: Sequence[int], decoder: Decoder) -> list[str]:
    """Return the text of each token, such that they join to the text of all.

    A character that several tokens make up is the text of the first, and the others have none.
    """
    if not tokens:
        return []
    # Some tokenizers drop the space of a word that stands first, so each is read behind another.
    before = [tokens[0]]
    start = decoder.decode(before)
    known: dict[int, str] = {}
    for token in set(tokens):
        behind = decoder.decode([*before, token])
        is_joined = behind.startswith(start)
        known[token] = behind[len(start) :] if is_joined else decoder.decode([token])
    texts = [start, *(known[token] for token in tokens[1:])]
    for index in range(len(texts)):
        if _PARTIAL in texts[index]:
            _join_character(index, tokens, texts, decoder)
    return texts


def _join_character(index: int, tokens: Sequence[int], texts: list[str], decoder: Decoder) -> None:
    """Put a character whose bytes several tokens hold where it begins, if it is one."""
    for end in range(index + 2, min(index + _MAX_PARTS, len(tokens)) + 1):
        if _PARTIAL not in (text := decoder.decode(list(tokens[index:end]))):
            texts[index:end] = [text, *[""] * (end - index - 1)]
            return


def _image(placed: PlacedImage) -> RecordedImage:
    width, height = image_size(placed.image.data, placed.image.format)
    return RecordedImage(
        position=placed.position,
        num_tokens=placed.num_tokens,
        format=placed.image.format,
        sha256=hashlib.sha256(placed.image.data).hexdigest(),
        width=width,
        height=height,
    )
