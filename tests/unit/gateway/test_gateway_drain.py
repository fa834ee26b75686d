"""The end of a gateway: what only waits is cut at once, and says why."""

from __future__ import annotations

import asyncio

import pytest

from tinsmith_gateway.serving.shutdown import Drain
from tinsmith_runtime.errors import DrainingError


async def held(drain: Drain, entered: asyncio.Event, *, is_wait: bool) -> None:
    with drain.running(is_wait=is_wait):
        entered.set()
        await asyncio.Event().wait()


async def begin(drain: Drain, *, is_wait: bool) -> asyncio.Task[None]:
    entered = asyncio.Event()
    task = asyncio.create_task(held(drain, entered, is_wait=is_wait))
    await entered.wait()
    return task


async def test_waits_are_cut_and_others_go_on() -> None:
    drain = Drain()
    wait, other = await begin(drain, is_wait=True), await begin(drain, is_wait=False)
    drain.begin()
    with pytest.raises(DrainingError):
        await wait
    await asyncio.sleep(0)
    assert not other.done()
    # Cut later, when its time is over.
    other.cancel()
    with pytest.raises(DrainingError):
        await other


async def test_nobody_begins_to_wait_at_the_end() -> None:
    drain = Drain()
    drain.begin()
    with pytest.raises(DrainingError):
        await held(drain, asyncio.Event(), is_wait=True)


async def test_a_cancellation_is_one_until_the_end() -> None:
    drain = Drain()
    for is_wait in (True, False):
        task = await begin(drain, is_wait=is_wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
