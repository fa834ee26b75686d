"""Which blocks of a KV cache are free, and how many readers the others have.

A sequence whose blocks lie behind each other is attended to without a copy. So blocks are given
away in runs where there is one, and some that follow are planned for its growth. Planned blocks are
free: others get them once there are no more. Pure bookkeeping: the numbers are in `kv_cache.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

BLOCK_TOKENS = 64
"""Positions of a block."""


def blocks_for(num_tokens: int) -> int:
    """Return how many blocks hold this many tokens."""
    return -(-num_tokens // BLOCK_TOKENS)


class BlockPool:
    """The blocks of one cache."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._num_readers = np.zeros(num_blocks, dtype=np.int32)
        self._is_planned = np.zeros(num_blocks, dtype=bool)
        self._is_clean = np.zeros(num_blocks, dtype=bool)
        self.num_free = num_blocks
        """How many blocks may be taken."""

    def take_run(self, count: int, num_planned: int) -> tuple[list[int], list[int]] | None:
        """Take blocks that lie behind each other, for one reader, and plan those that follow.

        Returns:
            The blocks, and those that are planned; None if there is no such run.
        """
        if not count:
            return [], []
        is_open = (self._num_readers == 0) & ~self._is_planned
        edges = np.flatnonzero(np.diff(is_open, prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]
        fitting = np.flatnonzero(ends - starts >= count + num_planned)
        if not len(fitting):
            return None
        start = int(starts[fitting[0]])
        planned = list(range(start + count, start + count + num_planned))
        self._is_planned[planned] = True
        return self._taken(list(range(start, start + count))), planned

    def take(self, count: int, preferred: Sequence[int] = ()) -> list[int]:
        """Take any free blocks, for one reader; there must be as many.

        Args:
            count: How many.
            preferred: Those that are wanted first, if they are free.
        """
        if count > self.num_free:
            raise AssertionError(f"{count} blocks wanted, {self.num_free} are free")
        found = [block for block in preferred if not self._num_readers[block]][:count]
        if len(found) < count:
            free = np.flatnonzero(self._num_readers == 0)
            # Planned ones last.
            ranked = free[np.argsort(self._is_planned[free], kind="stable")].tolist()
            found += [block for block in ranked if block not in found][: count - len(found)]
        return self._taken(found)

    def share(self, blocks: Sequence[int]) -> None:
        """Note one more reader of each block."""
        self._num_readers[blocks] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Note one reader less of each block; those without any are free."""
        self._num_readers[blocks] -= 1
        self.num_free += int((self._num_readers[blocks] == 0).sum())

    def unplan(self, blocks: Sequence[int]) -> None:
        """Give up what was planned."""
        self._is_planned[blocks] = False

    def num_open(self) -> int:
        """Return how many blocks are free and not planned."""
        return int(((self._num_readers == 0) & ~self._is_planned).sum())

    def num_read_by(self, counts: npt.NDArray[np.int32]) -> int:
        """Return how many blocks have readers, and as many as given for each of all blocks."""
        return int(((self._num_readers == counts) & (counts > 0)).sum())

    def distrust(self, blocks: Sequence[int] | None = None) -> None:
        """Note that blocks, or all of them, may hold numbers which are not finite."""
        self._is_clean[slice(None) if blocks is None else blocks] = False

    def clean(self, blocks: Iterable[int]) -> list[int]:
        """Return which of these are to be cleared before use, and count them as cleared."""
        unclean = [block for block in blocks if not self._is_clean[block]]
        self._is_clean[unclean] = True
        return unclean

    def _taken(self, blocks: list[int]) -> list[int]:
        self._num_readers[blocks] = 1
        self._is_planned[blocks] = False
        self.num_free -= len(blocks)
        return blocks
