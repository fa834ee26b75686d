"""Gathers what waits while a batch is being written, so that a busy writer makes large batches."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

WriteBatch = Callable[[Sequence[ItemT]], Awaitable[Sequence[ResultT | BaseException]]]


class Batcher(Generic[ItemT, ResultT]):
    """Writes one batch at a time; there is no timer, a lone item goes at once.

    Args:
        write: Returns a result or an error for each item. What it raises is the error of all.
        max_items: Of one batch.
    """

    def __init__(self, write: WriteBatch[ItemT, ResultT], *, max_items: int = 512) -> None:
        self._write = write
        self._max_items = max_items
        self._waiting: list[tuple[ItemT, asyncio.Future[ResultT]]] = []
        self._task: asyncio.Task[None] | None = None

    async def add(self, item: ItemT) -> ResultT:
        """Write an item with others. A cancelled caller does not cancel the write."""
        [answer] = await self.add_all([item])
        if isinstance(answer, BaseException):
            raise answer
        return answer

    async def add_all(self, items: Sequence[ItemT]) -> list[ResultT | BaseException]:
        """Write items in one batch; each has a result or an error of its own."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[ResultT]] = [loop.create_future() for _ in items]
        self._waiting += zip(items, futures, strict=True)
        if self._task is None:
            self._task = asyncio.create_task(self._write_all())
        return await asyncio.shield(asyncio.gather(*futures, return_exceptions=True))

    async def finish(self) -> None:
        """Return once nothing waits."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _write_all(self) -> None:
        while self._waiting:
            batch, self._waiting = (
                self._waiting[: self._max_items],
                self._waiting[self._max_items :],
            )
            answers: Sequence[ResultT | BaseException]
            try:
                answers = await self._write([item for item, _ in batch])
            except Exception as error:
                answers = [error] * len(batch)
            for (_, future), answer in zip(batch, answers, strict=True):
                if isinstance(answer, BaseException):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        self._task = None
