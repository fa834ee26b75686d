"""The line for places in an engine."""

from __future__ import annotations

import asyncio

from tinsmith_trainer.residency.slot_queue import SlotQueue


async def test_the_first_is_first_and_others_follow_when_it_leaves() -> None:
    line = SlotQueue()
    with line.join("m", "a") as first:
        with line.join("m", "b") as second, line.join("other", "c") as elsewhere:
            assert (first.is_first, second.is_first, elsewhere.is_first) == (True, False, True)
        with line.join("m", "d") as last:
            assert not last.is_first
    with line.join("m", "e") as alone:
        assert alone.is_first


async def test_who_sleeps_wants_a_place_until_it_looks_again() -> None:
    line = SlotQueue()
    with line.join("m", "a") as waiting:
        assert not line.wants_slot("m")
        sleeping = asyncio.create_task(waiting.sleep(60))
        await asyncio.sleep(0)
        assert (line.wants_slot("m"), line.wants_slot("other")) == (True, False)
        line.wake_first("m")
        await sleeping
        assert not line.wants_slot("m")


async def test_a_wake_before_the_sleep_is_not_lost() -> None:
    line = SlotQueue()
    with line.join("m", "a") as waiting:
        line.wake("m", "a")
        await asyncio.wait_for(waiting.sleep(60), 5)


async def test_leaving_wakes_the_next() -> None:
    line = SlotQueue()
    with line.join("m", "b") as first:
        with line.join("m", "c") as second:
            sleeping = asyncio.create_task(first.sleep(60))
            await asyncio.sleep(0)
            line.wake("m", "c")
            await asyncio.wait_for(second.sleep(60), 5)
            assert not sleeping.done()
        await asyncio.wait_for(sleeping, 5)


async def test_a_sleep_has_an_end() -> None:
    line = SlotQueue()
    with line.join("m", "a") as waiting:
        await asyncio.wait_for(waiting.sleep(0.001), 5)
        assert not line.wants_slot("m")
