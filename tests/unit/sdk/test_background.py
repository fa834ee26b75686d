"""The loop in the background, and what Ctrl-C in front of it leaves behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Coroutine, Iterator
from typing import Any

import pytest

from tinsmith.rpc.event_loop_thread import BackgroundLoop


@pytest.fixture
def background() -> Iterator[BackgroundLoop]:
    background = BackgroundLoop()
    yield background
    background.close()


def test_a_stream_is_closed_when_its_reader_stops(background: BackgroundLoop) -> None:
    closed = threading.Event()

    async def count() -> AsyncGenerator[int, None]:
        try:
            for number in range(10):
                yield number
        finally:
            closed.set()

    assert list(background.iterate(count())) == list(range(10))
    closed.clear()
    for number in background.iterate(count()):
        if number == 3:
            break
    assert closed.wait(10)


def test_an_interrupt_as_a_read_is_handed_over_ends_the_read(
    background: BackgroundLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()

    async def wait() -> AsyncGenerator[int, None]:
        try:
            await asyncio.sleep(3600)
            yield 0
        finally:
            closed.set()

    submit = BackgroundLoop.submit

    def interrupted(loop: BackgroundLoop, coroutine: Coroutine[Any, Any, Any]) -> Any:
        monkeypatch.undo()
        submit(loop, coroutine)
        raise KeyboardInterrupt

    monkeypatch.setattr(BackgroundLoop, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(background.iterate(wait()))
    assert closed.is_set()
