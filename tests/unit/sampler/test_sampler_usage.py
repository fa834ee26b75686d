"""What samples are charged with: their tokens, and their part of the engine's time."""

from __future__ import annotations

import pytest

from tinsmith_engine import SampleRequest
from tinsmith_runtime.usage import DAY_S, BudgetGate, UsageAmounts, UsageKey
from tinsmith_sampler.requests.usage_log import SampledUsage, SharedTime, amounts_of


def test_the_time_of_an_engine_is_shared_by_samples() -> None:
    time = SharedTime()
    # While there is no request, time is no request's.
    time.spend(100.0)
    first = time.enter(1)
    time.spend(2.0)
    second = time.enter(3)
    time.spend(8.0)
    assert time.leave(3, second) == 6.0
    time.spend(1.0)
    assert time.leave(1, first) == 2.0 + 2.0 + 1.0
    time.spend(100.0)
    third = time.enter(2)
    time.spend(1.0)
    assert time.leave(2, third) == 1.0


@pytest.mark.parametrize(
    ("is_read", "num_cached", "num_prefilled"), [(True, 1, 2), (True, 3, 0), (False, 1, 0)]
)
def test_a_prompt_is_charged_once_it_was_read(
    is_read: bool, num_cached: int, num_prefilled: int
) -> None:
    request = SampleRequest(prompt_tokens=[1, 2, 3], max_tokens=9)
    assert amounts_of(
        request, num_sampled_tokens=5, num_cached_tokens=num_cached, is_read=is_read, engine_s=0.5
    ) == UsageAmounts(
        num_sampled_tokens=5,
        num_prefilled_tokens=num_prefilled,
        num_cached_tokens=num_cached,
        engine_s=0.5,
    )


def sampled(num_tokens: int) -> UsageAmounts:
    return UsageAmounts(num_sampled_tokens=num_tokens)


def key(day: int, key_id: str = "k") -> UsageKey:
    return UsageKey(project="p", run="r", key_id=key_id, day=day)


async def test_totals_wait_until_they_are_reported() -> None:
    now_s = DAY_S - 1.0
    usage = SampledUsage(BudgetGate(), wall_clock=lambda: now_s)
    usage.charge("p", "r", "k", UsageAmounts())
    assert not (await usage.take(9)).totals
    usage.charge("p", "r", "k", sampled(3))
    now_s = float(DAY_S)
    usage.charge("p", "r", "k", sampled(1))
    usage.charge("p", "r", "k", sampled(1))
    first = await usage.take(1)
    assert first.totals == {key(0): sampled(3)}
    assert not first.stored
    await usage.note_reported(first)
    second = await usage.take(9)
    assert second.totals == {key(1): sampled(2)}
    # It grew while it was reported: the report is not the last.
    usage.charge("p", "r", "k", sampled(5))
    await usage.note_reported(second)
    third = await usage.take(9)
    assert third.totals == {key(1): sampled(7)}
    await usage.note_reported(third)
    assert not (await usage.take(9)).totals
    # A total of today grows on, whatever was reported of it.
    usage.charge("p", "r", "k", sampled(1))
    assert (await usage.take(9)).totals == {key(1): sampled(8)}


async def test_days_that_are_over_are_forgotten_once_they_are_reported() -> None:
    now_s = 1.0
    usage = SampledUsage(BudgetGate(), wall_clock=lambda: now_s)
    usage.charge("p", "r", "k", sampled(3))
    report = await usage.take(9)
    now_s = DAY_S + 1.0
    await usage.note_reported(report)
    now_s = 1.0
    usage.charge("p", "r", "k", sampled(1))
    assert (await usage.take(9)).totals == {key(0): sampled(1)}


def test_processes_count_apart() -> None:
    sources = {SampledUsage(BudgetGate()).source for _ in range(2)}
    assert len(sources) == 2
    assert all(source.startswith("sampler-") for source in sources)
