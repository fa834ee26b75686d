"""Rollouts that the server plays have the bits of those that a client plays."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
from tests.integration.servers import Deployment, create_key

import tinsmith
from tinsmith.rollouts import (
    EnvironmentTask,
    GroupConfig,
    GroupResult,
    RolloutConfig,
    RolloutRunner,
    Trajectory,
    run_groups,
)
from tinsmith.rollouts.adapters import ServiceInstance, ServiceSampler, create_service_instance
from tinsmith.sampling.sampler_forms import Sampler
from tinsmith.types import SamplingParams

CONFIG = RolloutConfig(max_turns=3, max_tokens_per_turn=6)
PARAMS = SamplingParams(temperature=1.0, seed=11)
GROUPS = GroupConfig(group_size=4)
TASKS = [EnvironmentTask(3), EnvironmentTask(4, {"high": 9})]


@pytest.fixture(scope="module")
def client(embedded: Deployment) -> Iterator[tinsmith.Client]:
    with embedded.client() as client:
        yield client


async def play_in_client(
    client: tinsmith.Client, sampler: Sampler, key: str
) -> GroupResult[EnvironmentTask]:
    async def create(task: EnvironmentTask) -> ServiceInstance:
        return await create_service_instance(
            client.environments, "guessing", seed=task.seed, config=task.config
        )

    runner = RolloutRunner(
        client.get_tokenizer("tiny"), ServiceSampler(sampler), CONFIG, params=PARAMS
    )
    return await run_groups(runner, TASKS, create, GROUPS, batch_key=key)


def play_on_server(
    client: tinsmith.Client, sampler: Sampler, key: str
) -> GroupResult[EnvironmentTask]:
    batch = client.rollouts.generate(
        "guessing",
        TASKS,
        sampler=sampler,
        config=CONFIG,
        params=PARAMS,
        groups=GROUPS,
        batch_key=key,
    )
    return batch.result()


def require_equal(left: Trajectory, right: Trajectory) -> None:
    assert left.reason == right.reason
    assert left.turns == right.turns
    assert left.messages == right.messages
    assert len(left.samples) == len(right.samples)
    for mine, theirs in zip(left.samples, right.samples, strict=True):
        for name in ("tokens", "loss_mask", "logprobs", "versions", "turn_indices"):
            ours, other = getattr(mine, name), getattr(theirs, name)
            assert ours.dtype == other.dtype
            assert np.array_equal(ours, other), name


@pytest.mark.parametrize("source", ["base_model", "run", "checkpoint"])
def test_server_and_client_play_the_same_bits(client: tinsmith.Client, source: str) -> None:
    run = client.create_lora_training_run("tiny", rank=4)
    sampler = {
        "base_model": lambda: client.create_sampler(base_model="tiny"),
        "run": run.sampler,
        "checkpoint": lambda: client.create_sampler(
            checkpoint=run.save_weights_for_sampler("one").result()
        ),
    }[source]()
    local = asyncio.run(play_in_client(client, sampler, "same"))
    remote = play_on_server(client, sampler, "same")
    assert [group.task for group in remote.groups] == TASKS
    for mine, theirs in zip(local.groups, remote.groups, strict=True):
        assert mine.rewards == theirs.rewards
        assert mine.advantages == theirs.advantages
        for left, right in zip(mine.trajectories, theirs.trajectories, strict=True):
            require_equal(left, right)
    assert remote.report == local.report
    other = play_on_server(client, sampler, "other")
    tokens = [
        [sample.tokens.tolist() for each in group.trajectories for sample in each.samples]
        for result in (remote, other)
        for group in result.groups
    ]
    assert tokens[:2] != tokens[2:]


def test_episodes_are_seen_as_they_end(client: tinsmith.Client) -> None:
    sampler = client.create_sampler(base_model="tiny")
    batch = client.rollouts.generate(
        "guessing", range(2), sampler=sampler, config=CONFIG, params=PARAMS, groups=GROUPS
    )
    seen = [(each.task_index, each.member_index) for each in batch.episodes()]
    assert sorted(seen) == [(task, member) for task in range(2) for member in range(4)]
    groups = batch.result().groups
    assert [group.task.seed for group in groups] == [0, 1]
    assert batch.report().num_completed == 8


async def test_the_asyncio_forms_do_the_same(client: tinsmith.Client) -> None:
    sampler = await client.create_sampler_async(base_model="tiny")
    batch = await client.rollouts.generate_async(
        "guessing", [5], sampler=sampler, config=CONFIG, params=PARAMS, groups=GROUPS
    )
    seen = [each async for each in batch.episodes()]
    assert len(seen) == 4
    assert len((await batch).groups) == 1
    await batch.delete_async()
    await batch.delete_async()
    with pytest.raises(tinsmith.NotFoundError, match="do not exist"):
        await batch.report_async()


def test_a_strangers_batch_does_not_exist(embedded: Deployment, client: tinsmith.Client) -> None:
    sampler = client.create_sampler(base_model="tiny")
    with embedded.client(api_key=create_key(embedded, "strangers")) as stranger:
        with pytest.raises(tinsmith.NotFoundError, match="sampling session") as caught:
            stranger.rollouts.generate("guessing", [1], sampler=sampler)
        assert caught.value.reason == "SAMPLING_SESSION_NOT_FOUND"
        own = stranger.create_sampler(base_model="tiny")
        with pytest.raises(tinsmith.NotFoundError, match="environment"):
            stranger.rollouts.generate("projects/default/environments/guessing", [1], sampler=own)
    with pytest.raises(tinsmith.NotFoundError, match="there are guessing, math") as caught:
        client.rollouts.generate("chess", [1], sampler=sampler)
    assert caught.value.reason == "ENVIRONMENT_NOT_FOUND"
