from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.unit.rollouts.fakes import CharTokenizer, FakeInstance, FakeObservation, FakeOutcome

from tinsmith.rollouts import (
    GroupConfig,
    NoRolloutsError,
    RolloutConfig,
    RolloutRunner,
    TerminationReason,
    center_rewards,
    run_groups,
)
from tinsmith.rollouts.groups import MAX_FAILED_BYTES
from tinsmith.types import ModelInput, SampledSequence, SamplingParams

TOKENIZER = CharTokenizer()


class CountingSampler:
    """Answers at once; fails on the calls that are listed."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.num_calls = 0
        self.num_running = 0
        self.max_running = 0
        self._failing = failing

    async def sample_async(self, prompt: ModelInput, params: SamplingParams) -> SampledSequence:
        call = self.num_calls
        self.num_calls += 1
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        await asyncio.sleep(0)
        self.num_running -= 1
        if call in self._failing:
            raise ConnectionError("sampler gone")
        return SampledSequence([75, 1], [-1.0, -0.5], [1, 1], "stop")


class Factory:
    """Makes instances whose episode fails on the plays that are listed; rewards count up."""

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.instances: list[FakeInstance] = []
        self._failing = failing

    async def __call__(self, task: str) -> FakeInstance:
        number = len(self.instances)
        failed: FakeOutcome | Exception = RuntimeError("worker died")
        good = FakeOutcome(FakeObservation(), float(number), True)
        instance = FakeInstance(task, [failed if number in self._failing else good])
        self.instances.append(instance)
        return instance


async def test_groups_are_complete_centred_and_bounded() -> None:
    sampler, create = CountingSampler(), Factory()
    config = GroupConfig(group_size=4, max_concurrency=3)
    result = await run_groups(RolloutRunner(TOKENIZER, sampler), ["a", "b"], create, config)
    assert [group.task for group in result.groups] == ["a", "b"]
    assert sampler.max_running <= 3
    for group in result.groups:
        assert len(group.trajectories) == 4
        assert sum(group.advantages) == pytest.approx(0.0)
        mean = sum(group.rewards) / 4
        assert group.advantages == pytest.approx([reward - mean for reward in group.rewards])
        assert len(group.arrays()) == 4
    assert result.report.num_completed == result.report.num_requested == 8
    assert result.report.reasons == {"done": 8}
    assert all(instance.num_deletes == 1 for instance in create.instances)


async def test_failed_episodes_are_replaced_and_are_no_zero_reward() -> None:
    create = Factory(failing=frozenset({0, 2}))
    sampler = CountingSampler(failing=frozenset({1}))
    config = GroupConfig(group_size=3)
    result = await run_groups(RolloutRunner(TOKENIZER, sampler), ["a"], create, config)
    (group,) = result.groups
    assert len(group.trajectories) == 3
    assert sorted(group.rewards) == [3.0, 4.0, 5.0]
    assert result.report.num_replaced == 3
    assert result.report.failures == {"environment_failed": 2, "sampler_failed": 1}
    # What was said until then is kept; of the sampler that failed there is nothing.
    assert [play.task for play in result.unused] == ["a", "a"]
    for play in result.unused:
        assert play.trajectory.reason is TerminationReason.ENVIRONMENT_FAILED
        assert play.trajectory.samples[0].tokens[-2:].tolist() == [75, 1]
        assert play.trajectory.failure == "RuntimeError: worker died"
    assert len({id(instance) for instance in create.instances}) == 6


async def test_an_episode_that_always_fails_leaves_its_group() -> None:
    class FirstFails(Factory):
        async def __call__(self, task: str) -> FakeInstance:
            if task == "bad":
                raise RuntimeError("no such level")
            return await super().__call__(task)

    config = GroupConfig(group_size=2, max_replacements=1)
    runner = RolloutRunner(TOKENIZER, CountingSampler())
    result = await run_groups(runner, ["bad", "good"], FirstFails(), config)
    assert [group.task for group in result.groups] == ["good"]
    report = result.report
    assert (report.num_lost, report.num_replaced, report.num_dropped_groups) == (2, 2, 1)
    assert report.failures == {"environment_failed": 4}
    assert report.last_failure == "RuntimeError: no such level"


async def test_a_small_group_is_dropped_with_its_good_episodes() -> None:
    config = GroupConfig(group_size=2, max_replacements=0)
    runner = RolloutRunner(TOKENIZER, CountingSampler())
    create = Factory(failing=frozenset({0}))
    result = await run_groups(runner, ["a", "b"], create, config)
    assert [group.task for group in result.groups] == ["b"]
    assert result.report.num_dropped_episodes == 1
    failed, dropped = result.unused
    assert [failed.trajectory.reason.value, dropped.trajectory.reason.value] == [
        "environment_failed",
        "done",
    ]
    assert (failed.task, dropped.task) == ("a", "a")


async def test_a_batch_without_survivors_is_an_error() -> None:
    runner = RolloutRunner(TOKENIZER, CountingSampler(frozenset(range(100))))
    with pytest.raises(NoRolloutsError, match="sampler gone"):
        await run_groups(runner, ["a"], Factory(), GroupConfig(group_size=2))
    create, config = Factory(frozenset(range(100))), GroupConfig(group_size=2, max_replacements=1)
    with pytest.raises(NoRolloutsError, match="worker died") as caught:
        await run_groups(RolloutRunner(TOKENIZER, CountingSampler()), ["a"], create, config)
    assert len(caught.value.unused) == 4


async def test_a_context_without_room_is_not_played_again() -> None:
    runner = RolloutRunner(TOKENIZER, CountingSampler(), RolloutConfig(max_context_tokens=4))
    create = Factory()
    with pytest.raises(NoRolloutsError, match="no room") as caught:
        await run_groups(runner, ["a"], create, GroupConfig(group_size=2))
    assert len(create.instances) == 2
    for play in caught.value.unused:
        assert play.trajectory.failure == "the first context leaves no room (context_full)"


async def test_of_a_long_play_that_failed_nothing_is_held() -> None:
    class Long(Factory):
        async def __call__(self, task: str) -> FakeInstance:
            return await super().__call__(task * (MAX_FAILED_BYTES if task == "b" else 1))

    config = GroupConfig(group_size=1, min_group_size=1, max_replacements=0)
    runner = RolloutRunner(
        TOKENIZER, CountingSampler(), RolloutConfig(max_context_tokens=MAX_FAILED_BYTES * 2)
    )
    result = await run_groups(runner, ["a", "b", "c"], Long(frozenset({0, 1})), config)
    assert [group.task for group in result.groups] == ["c"]
    assert result.report.num_lost == 2
    assert [play.task for play in result.unused] == ["a"]


async def test_what_an_environment_raises_can_be_written() -> None:
    class Raising(Factory):
        async def __call__(self, task: str) -> FakeInstance:
            raise RuntimeError("no file \udce9")

    runner = RolloutRunner(TOKENIZER, CountingSampler())
    with pytest.raises(NoRolloutsError) as caught:
        await run_groups(runner, ["a"], Raising(), GroupConfig(group_size=2))
    assert {play.trajectory.failure for play in caught.value.unused} == {"RuntimeError: no file ?"}


def test_reasons_that_say_nothing_about_the_policy() -> None:
    assert [reason.name for reason in TerminationReason if reason.is_infrastructure] == [
        "ENVIRONMENT_FAILED",
        "CANCELLED",
    ]


@given(
    hnp.arrays(
        np.float64,
        hnp.array_shapes(min_dims=2, max_dims=2, max_side=6),
        elements=st.floats(-10, 10) | st.just(float("nan")),
    )
)
def test_centred_rewards_sum_to_nought(rewards_PG: np.ndarray) -> None:
    advantages_PG = center_rewards(rewards_PG)
    assert np.isnan(advantages_PG).tolist() == np.isnan(rewards_PG).tolist()
    assert np.allclose(np.nansum(advantages_PG, axis=1), 0.0, atol=1e-9)


def test_a_group_of_one_has_no_advantage() -> None:
    nan = float("nan")
    assert center_rewards(np.asarray([[3.0, nan]]))[0][0] == 0.0
