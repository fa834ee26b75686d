"""Projects share the sampler: steps, prompts, blocks, by the clock of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.sampled import bits
from tests.unit.engine.test_sampling import request, run_all
from tests.unit.engine.test_sampling_cache import BLOCK_BYTES, prompts

from tinsmith_engine import Engine, Sampler
from tinsmith_engine.sampling.schedule.step_plan import ProjectWork, StepCosts, StepPlanner


def finishing_step(sampler: Sampler, request_id: int, *, at_most: int = 2000) -> int:
    """Step until a request has ended; return how many steps that took."""
    for step in range(at_most):
        if any(one.request_id == request_id for one in sampler.step()):
            return step + 1
    raise AssertionError("not finished")


def of(project: str, **changes: Any) -> Any:
    return request(cache_scope=project, **changes)


def test_a_flood_of_one_project_does_not_hold_up_another(engine: Engine) -> None:
    alone = Sampler(engine, max_sequences=8)
    num_steps = finishing_step(alone, alone.add(of("quiet", max_tokens=40)))
    # Every step takes as long as any other: rows and prompts are nearly free.
    sampler = Sampler(engine, max_sequences=8, clock=itertools.count().__next__)
    for seed in range(100):
        sampler.add(of("loud", max_tokens=60, seed=seed))
    for _ in range(5):
        sampler.step()
    request_id = sampler.add(of("quiet", max_tokens=40))
    assert finishing_step(sampler, request_id) <= 1.2 * num_steps


def test_a_large_group_holds_up_nothing_behind_it(engine: Engine) -> None:
    sampler = Sampler(engine, max_sequences=4, clock=itertools.count().__next__)
    sampler.add(of("a", max_tokens=100))
    # More samples than places: they begin as places come free.
    sampler.add(of("a", max_tokens=100, num_samples=50))
    other = sampler.add(of("b", max_tokens=5))
    assert finishing_step(sampler, other) <= 12
    assert sampler.num_active > 2


def test_a_long_prompt_that_waits_for_blocks_is_passed_and_begins_in_the_end(
    engine: Engine,
) -> None:
    sampler = Sampler(engine, cache_bytes=5 * BLOCK_BYTES)
    (large,) = prompts(1, 230, max_tokens=20)
    for seed in range(3):
        sampler.add(request(max_tokens=40, seed=seed))
    sampler.step()
    request_id = sampler.add(large)
    small = sampler.add(request(max_tokens=3, seed=9))
    assert finishing_step(sampler, small) <= 5
    # Small ones that keep coming do not hold it up for ever.
    for step in range(400):
        if step % 2 == 0:
            sampler.add(request(max_tokens=10, seed=step))
        if any(one.request_id == request_id for one in sampler.step()):
            break
    else:
        raise AssertionError("the long prompt never began")


def test_a_request_that_waits_for_blocks_is_passed_32_times(engine: Engine) -> None:
    sampler = Sampler(engine, cache_bytes=4 * BLOCK_BYTES, max_sequences=2)
    held = sampler.add(request(max_tokens=100))
    sampler.step()
    # It needs all blocks.
    (large,) = prompts(1, 230, max_tokens=20)
    large_id = sampler.add(large)
    small = {sampler.add(request(max_tokens=1, seed=seed)) for seed in range(40)}
    ended: list[int] = []
    while sampler.has_work:
        ended += [one.request_id for one in sampler.step()]
    assert small.issuperset(ended[:32])
    assert ended[32:34] == [held, large_id]


def test_a_project_below_its_part_of_the_blocks_takes_them_from_one_above(engine: Engine) -> None:
    requests = prompts(4, 100, max_tokens=100, cache_scope="loud")
    sampler = Sampler(engine, cache_bytes=8 * BLOCK_BYTES)
    loud = [sampler.add(one) for one in requests]
    sequences = []
    for _ in range(4):
        sequences += sampler.step()
    quiet = sampler.add(of("quiet", max_tokens=10))
    seen = {}
    for _ in range(30):
        for one in sampler.step():
            seen[one.request_id] = one
    assert quiet in seen
    while sampler.has_work:
        for one in sampler.step():
            seen[one.request_id] = one
    wanted = [run_all(Sampler(engine), one)[0][0] for one in requests]
    assert bits([seen[one] for one in loud]) == bits(wanted)


# The plan, on numbers alone.


def duration_s(num_rows: int, prompts: Sequence[int] = ()) -> float:
    """What a step takes on an imagined machine."""
    of_rows = 0.006 + 0.0008 * num_rows if num_rows else 0.0
    return of_rows + 0.004 * len(prompts) + 0.0001 * sum(prompts)


def test_costs_of_rows_and_prompts_are_learnt() -> None:
    costs = StepCosts()
    for step in range(200):
        num_rows, prompts = 1 + step % 17, [100 * (step % 5)] * (step % 3)
        costs.note(num_rows, prompts, duration_s(num_rows, prompts))
    assert costs.rows_of_step == pytest.approx(7.5, rel=0.2)
    assert costs.rows_of_prompt(800) == pytest.approx(105, rel=0.2)
    assert costs.rows_of_prompt(0) == 1


def test_a_pause_of_the_machine_changes_little() -> None:
    costs = StepCosts()
    for step in range(100):
        costs.note(1 + step % 8, [], duration_s(1 + step % 8))
    before = costs.rows_of_step
    costs.note(8, [], 30.0)
    assert costs.rows_of_step == pytest.approx(before, rel=0.5)


def test_rows_of_a_loud_project_take_as_long_as_the_step_itself() -> None:
    planner = StepPlanner(max_prompt_tokens=4096)
    for step in range(200):
        num_rows = 1 + step % 64
        planner.costs.note(num_rows, [], duration_s(num_rows))
    work = {"quiet": ProjectWork(1), "loud": ProjectWork(200)}
    counts = [planner.plan(work).num_rows for _ in range(20)]
    assert all(count is not None and count["quiet"] == 1 for count in counts)
    mean = sum(count["loud"] for count in counts if count is not None) / len(counts)
    assert 2 <= mean <= 5
    # Alone, it has them all.
    assert planner.plan({"loud": ProjectWork(200)}).num_rows is None


def test_where_rows_are_free_a_loud_project_keeps_its_rows() -> None:
    planner = StepPlanner(max_prompt_tokens=4096)
    for step in range(200):
        num_rows = 1 + step % 256
        planner.costs.note(num_rows, [], 0.01 + 0.00001 * num_rows)
    work = {"quiet": ProjectWork(1), "loud": ProjectWork(200)}
    counts = [planner.plan(work).num_rows for _ in range(20)]
    assert all(count == {"quiet": 1, "loud": 200} for count in counts)


def test_prompts_of_a_loud_project_leave_rows_of_others_their_half() -> None:
    planner = StepPlanner(max_prompt_tokens=4096)
    for step in range(200):
        num_rows, prompts = 1 + step % 17, [100 * (step % 5)] * (step % 3)
        planner.costs.note(num_rows, prompts, duration_s(num_rows, prompts))
    busy_s = num_tokens_of_quiet = 0.0
    for _ in range(400):
        work = {"quiet": ProjectWork(1), "loud": ProjectWork(0, [1000, 1000])}
        plan = planner.plan(work)
        rows = plan.num_rows or {}
        num_tokens_of_quiet += rows.get("quiet", 0)
        prompts = [1000] * plan.num_prompts.get("loud", 0)
        busy_s += duration_s(sum(rows.values()), prompts)
    # A token takes 6.8 ms alone.
    assert busy_s / num_tokens_of_quiet <= 2.2 * 0.0068
