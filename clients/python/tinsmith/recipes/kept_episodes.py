"""What remote agents played, as the trajectories that are kept of an experiment.

The server recorded what the model read and said; each call with an answer is a turn. Where an agent
rewarded its calls, each turn has the reward of its call; else the last one has that of the episode.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinsmith.episodes.types import Episode, EpisodeOutcome, RecordedTrajectory, placeholders
from tinsmith.images import ImageRules
from tinsmith.recipes.episode_groups import PlayedGroups
from tinsmith.recipes.experience import IS_SUCCESS, METRICS
from tinsmith.recipes.kept_rollouts import TRAIN, RolloutKeeper
from tinsmith.rollouts import (
    MASKED_VERSION,
    PlacedImage,
    TerminationReason,
    TokenSample,
    Trajectory,
    Turn,
    center_rewards,
)
from tinsmith.rollouts.records.making import Decoder
from tinsmith.rollouts.records.record import AGENT, Origin
from tinsmith.types import ImageChunk, SamplingParams


@dataclass(frozen=True, slots=True)
class EpisodeKeeper:
    """Keeps what agents played, if rollouts are kept.

    Attributes:
        keeper: Of the experiment.
        decoder: Says what each token is as text.
        queue: Where agents claim.
        images: How the model turns images into tokens; None if it reads none.
    """

    keeper: RolloutKeeper
    decoder: Decoder
    queue: str
    images: ImageRules | None = None

    def keep(self, phase: str, num_done: int, played: PlayedGroups) -> None:
        """Keep the submitted episodes of a phase, after some optimizer steps.

        In the phase `train` an advantage is a reward minus the mean of its group.
        """
        if phase == TRAIN:
            advantages_PG = center_rewards(played.rewards_PG).tolist()
        else:
            advantages_PG = [[None] * len(group) for group in played.groups]
        self.keeper.keep_episodes(
            phase,
            num_done,
            (
                (to_trajectory(episode, self.images), self._origin(episode), advantage)
                for group, advantages in zip(played.groups, advantages_PG, strict=True)
                # A group that lost an episode has fewer than there are advantages.
                for episode, advantage in zip(group, advantages, strict=False)
                # An agent that asked the model nothing left nothing to keep.
                if episode.trajectories
            ),
            self.decoder,
        )

    def _origin(self, episode: Episode) -> Origin:
        # How an agent drew its tokens is its own affair.
        return self.keeper.origin(
            SamplingParams(),
            kind=AGENT,
            environment=self.queue,
            environment_config={"task_id": episode.task_id},
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
    calls = [
        recorded.call_indices[call]
        for recorded in episode.trajectories
        for call in np.unique(_calls_of(recorded)[recorded.mask > 0])
    ]
    outcome = episode.outcome
    rewards = [outcome.step_rewards[call] if outcome.step_rewards else 0.0 for call in calls]
    if rewards:
        # Turns add up to what the episode earned, also where a call left no token.
        rewards[-1] += outcome.reward - math.fsum(rewards)
    last = len(counts) - 1
    turns = tuple(
        Turn(num_tokens, "", reward, end_of(outcome) if index == last else {})
        for index, (num_tokens, reward) in enumerate(zip(counts, rewards, strict=True))
    )
    return Trajectory(tuple(samples), turns, TerminationReason.DONE, key=episode.name)


def end_of(outcome: EpisodeOutcome) -> dict[str, Any]:
    """Return what an agent said of an episode, as an environment says it at its last step."""
    said: dict[str, Any] = {} if outcome.is_success is None else {IS_SUCCESS: outcome.is_success}
    return {**said, METRICS: outcome.metrics} if outcome.metrics else said


def _calls_of(recorded: RecordedTrajectory) -> NDArray[np.int64]:
    """Return for each token which of the calls of its sequence ends behind it."""
    ends = np.asarray(recorded.call_ends)
    return np.searchsorted(ends, np.arange(recorded.mask.size), side="right")


def to_sample(
    recorded: RecordedTrajectory, counts: list[int], rules: ImageRules | None
) -> TokenSample:
    """Return a sequence; the sampled tokens of each turn are counted on."""
    read, images = _flatten(recorded, rules)
    mask = recorded.mask > 0
    calls = _calls_of(recorded)
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
