"""Which blocks of a sampler's cache hold a prompt that was read before.

A prompt's blocks stay after its sequences have ended, until their room is wanted. A request with
the same prompt, weights and scope reads the same blocks, and takes the logits that were computed
after the prompt: the bits that it would have computed itself.

Only whole prompts are reused. The rest of a prompt behind a known prefix would have to attend to
the cache. Products then have other shapes than those of a prompt read in one pass, which round
differently: the result would depend on what happened to be known.

A scope keeps a project from finding out, by the time that its request takes, what others sampled.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from tinsmith_engine.base.types import Published
from tinsmith_engine.sampling.block_pool import BlockPool

# Each keeps a row of logits besides its blocks.
MAX_PROMPTS = 32


@dataclass(frozen=True, slots=True)
class PromptKey:
    """What must be equal for a prompt to be known."""

    scope: str
    weights: Published | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """A prompt that was read."""

    blocks: list[int]
    last_logits: Tensor
    """After its last token, [1, V]."""


class PromptCache:
    """Prompts in blocks, the most recently used last; a reader of their blocks.

    Args:
        pool: Of the blocks.
        max_prompts: How many are kept.
    """

    def __init__(self, pool: BlockPool, max_prompts: int = MAX_PROMPTS) -> None:
        self._pool = pool
        self._max_prompts = max_prompts
        self._known: OrderedDict[PromptKey, KnownPrompt] = OrderedDict()

    def find(self, key: PromptKey) -> KnownPrompt | None:
        """Return where a prompt is, if it is known."""
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
        return known

    @property
    def num_unread(self) -> int:
        """Blocks that nothing else reads."""
        return self._pool.num_read_once(
            [block for known in self._known.values() for block in known.blocks]
        )

    def __contains__(self, key: object) -> bool:
        return key in self._known

    def add(self, key: PromptKey, blocks: Sequence[int], last_logits: Tensor) -> None:
        """Note that blocks hold a prompt; the least recently used one may be forgotten."""
        if key in self._known:
            self._pool.release(self._known[key].blocks)
        self._pool.share(blocks)
        self._known[key] = KnownPrompt(list(blocks), last_logits)
        self._known.move_to_end(key)
        if len(self._known) > self._max_prompts:
            self.forget_oldest()

    def forget_oldest(self) -> bool:
        """Let go of the least recently used prompt; return whether there was one."""
        if not self._known:
            return False
        _, known = self._known.popitem(last=False)
        self._pool.release(known.blocks)
        return True

    def forget(self, blocks: Iterable[int]) -> None:
        """Let go of the prompts that lie in any of these blocks."""
        doubtful = set(blocks)
        for key in [key for key, known in self._known.items() if doubtful & set(known.blocks)]:
            self._pool.release(self._known.pop(key).blocks)

    def clear(self) -> None:
        """Forget all prompts."""
        while self.forget_oldest():
            pass
