"""Ranks of an engine as threads of one process: what they tell each other goes through memory."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from tinsmith_engine.distributed.process_group import Pending, RankFault, Ranks

DEADLINE_S = 200.0
ResultT = TypeVar("ResultT")


class _There:
    def wait(self) -> None:
        """Return: it is there already."""


class ThreadRanks(Ranks):
    """One rank; each call is made by all of them, in the same order.

    Args:
        rank: Number of this thread, from 0.
        barrier: Of all threads.
        given: One place for each thread, shared by all.
    """

    def __init__(self, rank: int, barrier: threading.Barrier, given: list[Any]) -> None:
        super().__init__(rank, len(given), torch.device("cpu"), DEADLINE_S)
        self._barrier, self._given = barrier, given

    def broadcast(self, message: bytes | None, tag: str) -> bytes:
        return self.all_gather(message or b"", tag)[0]

    def all_gather(self, message: bytes, tag: str) -> list[bytes]:
        def read(given: list[Any]) -> list[bytes]:
            assert {found for found, _ in given} == {tag}
            return [each for _, each in given]

        return self._together((tag, message), read)

    def share(self, tensor: Tensor, owner: int) -> None:
        self._together(tensor, lambda given: tensor.copy_(given[owner]))

    def exchange(self, parts: Tensor) -> Tensor:
        return self._together(parts, lambda given: torch.stack([each[self.rank] for each in given]))

    def gather(self, whole: Tensor, part: Tensor) -> Pending:
        self._together(part, lambda given: whole.copy_(torch.cat(given)))
        return _There()

    def _together(self, mine: Any, use: Callable[[list[Any]], ResultT]) -> ResultT:
        """Return what a function finds in the values that all ranks give."""
        self._given[self.rank] = mine
        self._meet()
        found = use(list(self._given))
        # None goes on to change what others still read.
        self._meet()
        return found

    def _meet(self) -> None:
        try:
            self._barrier.wait()
        except threading.BrokenBarrierError as error:
            raise RankFault("another rank is gone") from error


def run_as_threads(run: Callable[[Ranks], ResultT], world_size: int = 2) -> list[ResultT]:
    """Call a function as each rank; return what each returned, or raise what the first raised."""
    barrier, given = threading.Barrier(world_size, timeout=DEADLINE_S), [None] * world_size

    def run_one(rank: int) -> ResultT:
        try:
            return run(ThreadRanks(rank, barrier, given))
        except BaseException:
            # Others do not wait for it.
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(run_one, rank) for rank in range(world_size)]
    failures = [future.exception() for future in futures]
    known = [each for each in failures if not isinstance(each, RankFault)]
    for failure in filter(None, [*known, *failures]):
        raise failure
    return [future.result() for future in futures]
