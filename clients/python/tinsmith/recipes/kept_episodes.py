"""What remote agents played, as the trajectories that are kept of an experiment.

The server recorded what the model read and said; each call with an answer is a turn. What an agent
earned is the reward of its last turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tinsmith.episodes.types import Episode, RecordedTrajectory, placeholders
from tinsmith.images import ImageRules
from tinsmith.recipes.kept_rollouts import RolloutKeeper
from tinsmith.rollouts import (
    MASKED_VERSION,
    PlacedImage,
    TerminationReason,
    TokenSample,
    Trajectory,
    Turn,
)
from tinsmith.rollouts.records.making import Decoder
from tinsmith.rollouts.records.record import AGENT
from tinsmith.types import ImageChunk, SamplingParams


def keep_agent_episodes(
    keeper: RolloutKeeper,
    phase: str,
    num_done: int,
    episodes: Sequence[tuple[Episode, float | None]],
    decoder: Decoder,
    *,
    queue: str,
    images: ImageRules | None = None,
) -> None:
    """Keep what agents played, if rollouts are kept.

    Args:
        keeper: Of the experiment.
        phase: `train` or `validation`.
        num_done: Optimizer steps that were done before.
        episodes: Submitted episodes, and the advantage of each.
        decoder: Says what each token is as text.
        queue: Where agents claimed them.
        images: How the model turns images into tokens; None if it reads none.
    """
    keeper.keep_episodes(
        phase,
        num_done,
        (
            (
                to_trajectory(episode, images),
                # How an agent drew its tokens is its own affair.
                keeper.origin(
                    SamplingParams(),
                    kind=AGENT,
                    environment=queue,
                    environment_config={"task_id": episode.task_id},
                ),
                advantage,
            )
            for episode, advantage in episodes
            # An agent that asked the model nothing left nothing to keep.
            if episode.trajectories
        ),
        decoder,
    )


def to_trajectory(episode: Episode, images: ImageRules | None = None) -> Trajectory:
    """Return a submitted episode as a trajectory: a sample for each recorded sequence.

    Args:
        episode: As the server recorded it.
        images: How the model turns images into tokens; needed if a prompt holds any.
    """
    assert episode.outcome is not None, "a submitted episode has an outcome"
    samples: list[TokenSample] = []
    counts: list[int] = []
    for recorded in episode.trajectories:
        samples.append(to_sample(recorded, counts, images))
    last = len(counts) - 1
    turns = tuple(
        Turn(num_tokens, "", episode.outcome.reward if index == last else 0.0)
        for index, num_tokens in enumerate(counts)
    )
    return Trajectory(tuple(samples), turns, TerminationReason.DONE, key=episode.name)


def to_sample(
    recorded: RecordedTrajectory, counts: list[int], rules: ImageRules | None
) -> TokenSample:
    """Return a sequence; the sampled tokens of each turn are counted on."""
    read, images = _flatten(recorded, rules)
    mask = recorded.mask > 0
    calls = np.searchsorted(np.asarray(recorded.call_ends), np.arange(mask.size), side="right")
    turns = np.full(mask.size, -1, dtype=np.int64)
    for call in np.unique(calls[mask]):
        is_of_call = mask & (calls == call)
        turns[is_of_call] = len(counts)
        counts.append(int(is_of_call.sum()))
    context = len(read)
    return TokenSample(
        tokens=np.concatenate((np.asarray(read, dtype=np.int64), recorded.tokens)),
        loss_mask=np.concatenate((np.zeros(context, dtype=np.bool_), mask)),
        logprobs=np.concatenate((np.zeros(context), recorded.logprobs)).astype(np.float32),
        versions=np.concatenate(
            (
                np.full(context, MASKED_VERSION, dtype=np.int64),
                np.where(mask, recorded.versions, MASKED_VERSION),
            )
        ),
        turn_indices=np.concatenate((np.full(context, -1, dtype=np.int64), turns)),
        images=tuple(images),
    )


def _flatten(
    recorded: RecordedTrajectory, rules: ImageRules | None
) -> tuple[list[int], list[PlacedImage]]:
    """Return the tokens of a prompt, and where its images are among them."""
    read: list[int] = []
    images: list[PlacedImage] = []
    for chunk in recorded.counted_prompt(rules).chunks:
        if isinstance(chunk, ImageChunk):
            images.append(PlacedImage(len(read), chunk.length, chunk))
        read += placeholders(chunk, rules)
    return read, images


def with_advantages(
    groups: Sequence[Sequence[Episode]], advantages_PG: Sequence[Sequence[float | None]]
) -> Iterator[tuple[Episode, float | None]]:
    """Yield the episodes of groups, each with its advantage."""
    for group, advantages in zip(groups, advantages_PG, strict=True):
        yield from zip(group, advantages, strict=False)
