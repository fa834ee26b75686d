"""An error of several calls is let go of by one of them, and the others go on."""

import asyncio

from tinsmith_runtime.rpc.interceptors import forget_frames


async def test_what_still_waits_with_an_error_at_hand_goes_on() -> None:
    goes_on = asyncio.Event()
    seen: list[Exception] = []

    async def waits() -> str:
        try:
            raise KeyError("of a write that several wait for")
        except KeyError as error:
            seen.append(error)
            await goes_on.wait()
            return "went on"

    task = asyncio.create_task(waits())
    await asyncio.sleep(0)
    shared = RuntimeError("of another call")
    shared.__context__ = seen[0]
    forget_frames(shared)
    goes_on.set()
    assert await task == "went on"
    assert seen[0].__traceback__ is None
