"""Which blocks of a sampler's cache hold a prompt, or a beginning of one, that was read before.

Blocks of a prompt and of its sequences stay after those have ended, until their room is wanted. A
request with the same prompt, weights and scope takes the logits that were computed after the
prompt. One whose prompt begins alike, as the next turn of a conversation does, takes whole blocks
of the beginning and reads the rest.

What is taken has the bits that the request would have computed itself: those of a position do not
depend on where a prompt is cut, nor on whether a token was read or sampled. The key is the exact
version: serials are never used twice. Tokens that were cached while weights changed are not kept.

A scope keeps a project from finding out, by the time that its request takes, what others sampled.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tinsmith_engine.base.types import WeightVersion
from tinsmith_engine.sampling.cache.block_pool import BLOCK_TOKENS, BlockPool

# Each keeps a row of logits besides its blocks.
MAX_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class PromptKey:
    """What must be equal for a prompt to be known."""

    scope: str
    weights: WeightVersion | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt that was read."""

    blocks: list[int]
    last_logits: Tensor
    """After its last token, [1, V]."""


_Beginning = tuple[str, WeightVersion | None, bytes]
"""Scope, weights and digest of the tokens of a number of whole blocks."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """Blocks, and what may be found of them."""

    blocks: list[int]
    beginnings: list[_Beginning]
    """For 1, 2, ... of the blocks that are full."""
    last_logits: Tensor | None
    """None where only beginnings are known."""


def digests_of_blocks(tokens: Sequence[int]) -> list[bytes]:
    """Return for 1, 2, ... whole blocks a digest of all tokens up to the end of that block."""
    running = hashlib.sha256()
    found = []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = np.asarray(tokens[start : start + BLOCK_TOKENS], dtype=np.int64)
        running.update(block.tobytes())
        found.append(running.digest())
    return found


class PromptCache:
    """Prompts and beginnings in blocks, the most recently used last; a reader of their blocks.

    Args:
        pool: Of the blocks.
        max_prompts: How many are kept with the logits after them. Beginnings are bounded by the
            blocks.
    """

    def __init__(self, pool: BlockPool, max_prompts: int = MAX_PROMPTS) -> None:
        self._pool = pool
        self._max_prompts = max_prompts
        self._kept: OrderedDict[PromptKey, _Kept] = OrderedDict()
        self._by_beginning: dict[_Beginning, list[PromptKey]] = {}
        self._num_held = np.zeros(pool.num_blocks, dtype=np.int32)
        self._num_prompts = 0

    def find(self, key: PromptKey) -> KnownPrompt | None:
        """Return where a prompt is, if it is known."""
        kept = self._kept.get(key)
        if kept is None or kept.last_logits is None:
            return None
        self._kept.move_to_end(key)
        return KnownPrompt(kept.blocks, kept.last_logits)

    def find_beginning(
        self, scope: str, weights: WeightVersion | None, digests: Sequence[bytes]
    ) -> list[int]:
        """Return the blocks of the longest known beginning of tokens.

        Args:
            scope: Whose tokens.
            weights: What reads them.
            digests: As `digests_of_blocks` returns them, for as many blocks as may be taken.
        """
        for count in range(len(digests), 0, -1):
            keys = self._by_beginning.get((scope, weights, digests[count - 1]))
            if keys:
                self._kept.move_to_end(keys[-1])
                return self._kept[keys[-1]].blocks[:count]
        return []

    @property
    def num_unread(self) -> int:
        """Blocks that nothing else reads."""
        return self._pool.num_read_by(self._num_held)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, PromptKey) and key in self._kept and self._is_prompt(key)

    def _is_prompt(self, key: PromptKey) -> bool:
        return self._kept[key].last_logits is not None

    def add(self, key: PromptKey, blocks: Sequence[int], last_logits: Tensor) -> None:
        """Note that blocks hold a prompt; of too many, the scope that has most forgets one."""
        self._keep(key, blocks, digests_of_blocks(key.tokens), last_logits)
        self._num_prompts += 1
        if self._num_prompts > self._max_prompts:
            prompts = list(filter(self._is_prompt, self._kept))
            [(fullest, _)] = Counter(each.scope for each in prompts).most_common(1)
            self._forget(next(each for each in prompts if each.scope == fullest))

    def add_beginning(
        self,
        scope: str,
        weights: WeightVersion | None,
        tokens: Sequence[int],
        blocks: Sequence[int],
    ) -> None:
        """Note that blocks hold the keys and values of tokens; what is not full is left out."""
        digests = digests_of_blocks(tokens)
        count = len(digests)
        if not count or self.find_beginning(scope, weights, digests[-1:]):
            return
        key = PromptKey(scope, weights, tuple(tokens[: count * BLOCK_TOKENS]))
        self._keep(key, blocks[:count], digests, None)
        self._drop_shorter(key)

    def _drop_shorter(self, key: PromptKey) -> None:
        """Let go of beginnings that a longer one has as well."""
        for count, beginning in enumerate(self._kept[key].beginnings, start=1):
            for other in list(self._by_beginning[beginning]):
                is_shorter = other != key and len(self._kept[other].beginnings) == count
                if is_shorter and not self._is_prompt(other):
                    self._forget(other)

    def _keep(
        self,
        key: PromptKey,
        blocks: Sequence[int],
        digests: Sequence[bytes],
        last_logits: Tensor | None,
    ) -> None:
        if key in self._kept:
            self._forget(key)
        self._pool.share(blocks)
        self._num_held[list(blocks)] += 1
        beginnings = [(key.scope, key.weights, digest) for digest in digests if blocks]
        self._kept[key] = _Kept(list(blocks), beginnings, last_logits)
        for beginning in beginnings:
            self._by_beginning.setdefault(beginning, []).append(key)

    def _forget(self, key: PromptKey) -> None:
        kept = self._kept.pop(key)
        self._num_prompts -= kept.last_logits is not None
        self._num_held[kept.blocks] -= 1
        self._pool.release(kept.blocks)
        for beginning in kept.beginnings:
            keys = self._by_beginning[beginning]
            keys.remove(key)
            if not keys:
                del self._by_beginning[beginning]

    def forget_oldest(self) -> bool:
        """Let go of what was used least recently; return whether there was anything."""
        if not self._kept:
            return False
        self._forget(next(iter(self._kept)))
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Let go of what lies in any of these blocks."""
        doubtful = set(blocks)
        for key in [key for key, kept in self._kept.items() if doubtful & set(kept.blocks)]:
            self._forget(key)

    def clear(self) -> None:
        """Forget everything."""
        while self.forget_oldest():
            pass
