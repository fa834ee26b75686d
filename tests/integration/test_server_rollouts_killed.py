"""A coordinator killed in the middle of rollouts: nothing lost, nothing doubled, same bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tests.integration.servers import pods

import tinsmith
from tinsmith.rollouts import EnvironmentTask, GroupConfig, GroupResult, RolloutBatch, RolloutConfig
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.types import SamplingParams

NUM_TASKS = 6
NUM_KILLS = 3


def generate(client: tinsmith.Client, sampler: Sampler) -> RolloutBatch:
    return client.rollouts.generate(
        "guessing",
        range(NUM_TASKS),
        sampler=sampler,
        config=RolloutConfig(max_turns=4, max_tokens_per_turn=8),
        params=SamplingParams(seed=5),
        groups=GroupConfig(group_size=4, max_concurrency=3),
        batch_key="killed",
    )


def bits_of(result: GroupResult[EnvironmentTask]) -> list[bytes]:
    return [
        np.asarray(array).tobytes()
        for group in result.groups
        for play in group.trajectories
        for sample in play.samples
        for array in (sample.tokens, sample.logprobs, sample.versions, play.reward)
    ]


def test_killed_rollouts_have_the_bits_of_undisturbed_ones(tmp_path: Path, model_dir: Path) -> None:
    running = pods(tmp_path, model_dir, "gateway", "environment", "coordinator")
    with running as (deployment, processes), deployment.client() as client:
        sampler = client.create_sampler(base_model="tiny")
        undisturbed = bits_of(generate(client, sampler).result())
        batch = generate(client, sampler)
        seen = []
        for episode in batch.episodes():
            seen.append((episode.task_index, episode.member_index, episode.attempt))
            if len(seen) % 5 == 0 and len(seen) // 5 <= NUM_KILLS:
                processes["coordinator"].kill()
                processes["coordinator"].start()
        result = batch.result()
        assert bits_of(result) == undisturbed
        assert len(seen) == len(set(seen)) == NUM_TASKS * 4
        assert result.report.failures == {}
