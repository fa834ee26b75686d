"""The plan of a batch: which episodes are played, taken, replaced and given up."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.rollouts.fakes import CharTokenizer, FakeInstance, FakeObservation, FakeOutcome

from tinsmith.rollouts import GroupConfig, GroupPlan, Play, RolloutRunner, run_groups
from tinsmith.types import ModelInput, SampledSequence, SamplingParams

Ended = tuple[Play, bool, bool]


def play_out(
    plan: GroupPlan, generator: random.Random, *, failure_rate: float, stop_after: int = 10**6
) -> list[Ended]:
    """Drive a plan with plays that end in any order; return their ends."""
    ended: list[Ended] = []
    running = set(plan.running)
    while not plan.is_done and len(ended) < stop_after:
        running |= set(plan.begin())
        play = generator.choice(sorted(running))
        running.discard(play)
        has_finished = generator.random() >= failure_rate
        may_repeat = generator.random() < 0.8
        if has_finished:
            running -= plan.finish(play)
        else:
            running -= plan.fail(play, may_repeat=may_repeat)
        ended.append((play, has_finished, may_repeat))
    return ended


configs = st.builds(
    GroupConfig,
    group_size=st.integers(2, 5),
    max_concurrency=st.integers(1, 12),
    max_replacements=st.integers(0, 3),
    min_group_size=st.integers(1, 2),
    num_groups=st.integers(0, 3),
    over_sampling_factor=st.floats(1.0, 3.0),
)


@given(configs, st.integers(3, 7), st.integers(0, 10**6), st.floats(0.0, 0.9))
def test_no_more_is_taken_than_wanted_and_nothing_twice(
    config: GroupConfig, num_tasks: int, seed: int, failure_rate: float
) -> None:
    plan = GroupPlan(num_tasks, config)
    ended = play_out(plan, random.Random(seed), failure_rate=failure_rate)
    assert len(plan.taken) <= plan.num_wanted
    finished = {(play.task, play.member) for play, has_finished, _ in ended if has_finished}
    for task, members in plan.taken.items():
        assert config.min_group_size <= len(members) <= config.group_size
        assert len(set(members)) == len(members)
        assert {(task, member) for member in members} <= finished
    plays = [play for play, _, _ in ended]
    assert len(set(plays)) == len(plays)
    assert max(play.attempt for play in plays) <= config.max_replacements
    assert not plan.begin()


@given(configs, st.integers(3, 7), st.integers(0, 10**6), st.floats(0.0, 0.9), st.integers(0, 40))
def test_a_plan_that_was_interrupted_ends_as_one_that_was_not(
    config: GroupConfig, num_tasks: int, seed: int, failure_rate: float, stop_after: int
) -> None:
    whole = GroupPlan(num_tasks, config)
    ended = play_out(whole, random.Random(seed), failure_rate=failure_rate)
    resumed = GroupPlan(num_tasks, config)
    resumed.resume(ended[:stop_after])
    resumed.resume(ended[stop_after:])
    assert resumed.taken == whole.taken
    assert resumed.is_done == whole.is_done
    for name in ("num_replaced", "num_lost", "num_dropped_groups", "num_dropped_episodes"):
        assert getattr(resumed, name) == getattr(whole, name)


def test_over_sampling_takes_the_first_and_gives_the_rest_up() -> None:
    plan = GroupPlan(1, GroupConfig(group_size=2, over_sampling_factor=2.0))
    plays = plan.begin()
    assert [play.member for play in plays] == [0, 1, 2, 3]
    assert plan.finish(plays[3]) == frozenset()
    assert plan.finish(plays[1]) == {plays[0], plays[2]}
    assert plan.taken == {0: (1, 3)}
    assert plan.is_done


def test_a_dropped_group_is_replaced_by_a_spare_task() -> None:
    plan = GroupPlan(3, GroupConfig(group_size=2, num_groups=1, max_replacements=0))
    first = plan.begin()
    assert {play.task for play in first} == {0}
    for play in first:
        plan.fail(play)
    second = plan.begin()
    assert {play.task for play in second} == {1}
    for play in second:
        plan.finish(play)
    assert plan.taken == {1: (0, 1)}
    assert (plan.num_dropped_groups, plan.num_lost) == (1, 2)


def test_more_groups_than_tasks_and_plays_that_do_not_run_are_refused() -> None:
    with pytest.raises(ValueError, match="num_groups is 3, and there are 2 tasks"):
        GroupPlan(2, GroupConfig(num_groups=3))
    with pytest.raises(ValueError, match="over_sampling_factor must be 1 to 16"):
        GroupConfig(over_sampling_factor=0.5)
    with pytest.raises(ValueError, match="does not run"):
        GroupPlan(1, GroupConfig()).finish(Play(0, 0))


class HangingSampler:
    """Answers at once but for the calls that are listed, which never end."""

    def __init__(self, hanging: frozenset[int]) -> None:
        self._hanging = hanging
        self._num_calls = 0

    async def sample_async(self, prompt: ModelInput, params: SamplingParams) -> SampledSequence:
        call = self._num_calls
        self._num_calls += 1
        if call in self._hanging:
            await asyncio.Event().wait()
        return SampledSequence([75, 1], [-1.0, -0.5], [1, 1], "stop")


async def test_an_episode_that_hangs_holds_no_group_that_is_over_sampled() -> None:
    instances: list[FakeInstance] = []

    async def create(task: str) -> FakeInstance:
        instances.append(FakeInstance(task, [FakeOutcome(FakeObservation(), 1.0, True)]))
        return instances[-1]

    config = GroupConfig(group_size=2, over_sampling_factor=1.5)
    runner = RolloutRunner(CharTokenizer(), HangingSampler(frozenset({1})))
    result = await run_groups(runner, ["a"], create, config)
    assert len(result.groups[0].trajectories) == 2
    assert (result.report.num_begun, result.report.num_cancelled) == (3, 1)
    assert all(instance.num_deletes == 1 for instance in instances)
