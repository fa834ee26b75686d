"""The blocks of the sequences of one sampler: prompts are read into them, and tokens follow.

Each sample of a prompt has a copy of its blocks while there is room for that: blocks that lie
behind each other are attended to without a copy in each step. Else samples share the blocks that
the prompt fills. Blocks of known prompts are let go of, the least recently used first, when room is
wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from tinsmith_engine.packing.images import rope_shift
from tinsmith_engine.sampling.block_pool import BLOCK_TOKENS, BlockPool, blocks_for
from tinsmith_engine.sampling.decode_step import Decoding
from tinsmith_engine.sampling.prefix_cache import PromptCache
from tinsmith_engine.sampling.prompt_logprobs import (
    first_scored_position,
    score_prompt,
    wants_scores,
)
from tinsmith_engine.sampling.sample_request import SampleRequest
from tinsmith_engine.sampling.sequences import ActiveSequence, Order

_MIN_PLANNED = 4


class ReadPrompt(NamedTuple):
    """A prompt that was read, or known."""

    blocks: list[int]
    """Its reader is the caller."""
    last_logits: Tensor
    """After its last token, [1, V]."""
    rope_shift: int
    planned: list[int]
    """Blocks for the first sequence to grow into."""
    is_known: bool
    """Whether it was read before."""


class SequenceCache:
    """Sequences in the blocks of a cache.

    Args:
        decoding: Reads prompts, and holds the numbers.
    """

    def __init__(self, decoding: Decoding) -> None:
        self._decoding = decoding
        self._pool = BlockPool(decoding.num_blocks)
        self.prompts = PromptCache(self._pool)

    @property
    def num_blocks(self) -> int:
        """Of all of the cache."""
        return self._pool.num_blocks

    @property
    def num_available(self) -> int:
        """Blocks that are free, or hold nothing but known prompts."""
        return self._pool.num_free + self.prompts.num_unread

    def is_known(self, order: Order) -> bool:
        """Whether the prompt of a request need not be read."""
        return order.key in self.prompts and not _is_scored(order)

    def blocks_to_resume(self, sequence: ActiveSequence) -> int:
        """Return how many blocks a sequence that gave way needs to read all of its tokens again."""
        num_blocks = self._decoding.blocks_for(len(sequence.tokens))
        return max(num_blocks, self.blocks_to_begin(sequence.order, 1))

    def blocks_to_begin(self, order: Order, num_samples: int) -> int:
        """Return how many blocks samples need for the prompt and the first step behind it."""
        request = order.request
        num_tokens = len(request.prompt_tokens)
        num_blocks = 0 if self.is_known(order) else self._decoding.blocks_for(num_tokens)
        if request.max_tokens <= 1 or not self._pool.num_blocks:
            return num_blocks
        # The first of them writes into the last block of a prompt that it read, if it has room.
        has_room = num_tokens % BLOCK_TOKENS != 0 and num_blocks > 0
        return num_blocks + num_samples - has_room

    def make_room_for(self, order: Order, num_samples: int) -> bool:
        """Let go of known prompts until samples can begin; return whether they can."""
        if order.key is not None:
            self.prompts.find(order.key)
        while self.make_room(num_blocks := self.blocks_to_begin(order, num_samples)):
            # The prompt may have been known until room was made.
            if num_blocks >= self.blocks_to_begin(order, num_samples):
                return True
        return False

    def make_room(self, num_blocks: int) -> bool:
        """Let go of known prompts until as many blocks are free; return whether they are."""
        while self._pool.num_free < num_blocks:
            if not self.prompts.forget_oldest():
                return False
        return True

    def read(self, order: Order) -> ReadPrompt:
        """Return the prompt of a request in blocks; there must be room for it.

        The listener of the request is told if this is the first time.
        """
        request = order.request
        num_tokens = len(request.prompt_tokens)
        is_scored = _is_scored(order)
        known = None if order.key is None or is_scored else self.prompts.find(order.key)
        prompt, planned = None, list[int]()
        if known is not None:
            blocks, last = list(known.blocks), known.last_logits
            self._pool.share(blocks)
        else:
            num_blocks = self._decoding.blocks_for(num_tokens)
            run = self._pool.take_run(num_blocks, _num_planned(num_blocks, request.max_tokens))
            blocks, planned = run or (self._take(num_blocks), [])
            self._clear(blocks)
            try:
                first = first_scored_position(request) if is_scored else num_tokens - 1
                last, chunks = self._decoding.prefill(
                    order.weights, request.prompt_tokens, blocks, request.images, first_scored=first
                )
                prompt = score_prompt(request, chunks) if is_scored else None
            except BaseException:
                # Whatever was written is not a prompt, and may not be finite.
                self._pool.distrust(blocks)
                self._pool.release(blocks)
                self._pool.unplan(planned)
                raise
            if order.key is not None:
                # A copy: this is a view of all the rows that were computed with it.
                self.prompts.add(order.key, blocks, last.clone())
        if not order.is_read:
            order.is_read, order.prompt = True, prompt
            order.num_cached_tokens = 0 if known is None else num_tokens
            if order.listener is not None:
                order.listener.begin(prompt, order.num_cached_tokens, order.version)
        return ReadPrompt(
            blocks, last, rope_shift(request.images), planned, is_known=known is not None
        )

    def adopt(self, begun: Sequence[ActiveSequence], prompt: ReadPrompt) -> None:
        """Give sequences the blocks of their prompt, of which the caller is a reader."""
        request = begun[0].order.request
        num_tokens = len(request.prompt_tokens)
        num_blocks = len(prompt.blocks)
        num_planned = _num_planned(num_blocks, request.max_tokens)
        has_room = self._pool.num_open() >= len(begun) * (num_blocks + num_planned)
        left = list(begun)
        if not prompt.is_known or request.max_tokens <= 1:
            # It may write behind the prompt that is known from now on: that is not looked at.
            left[0].blocks, left[0].planned = list(prompt.blocks), prompt.planned
            self._pool.share(prompt.blocks)
            left = left[1:]
        num_shared = num_tokens // BLOCK_TOKENS if num_blocks else 0
        for sequence in left:
            run = self._pool.take_run(num_blocks, num_planned) if has_room else None
            if run is not None:
                sequence.blocks, sequence.planned = run
                self._copy(prompt.blocks, sequence.blocks)
                continue
            shared = prompt.blocks[:num_shared] if request.max_tokens > 1 else prompt.blocks
            self._pool.share(shared)
            own = self._take(num_blocks - len(shared))
            self._copy(prompt.blocks[len(shared) :], own)
            sequence.blocks = [*shared, *own]
        for sequence in begun:
            sequence.num_cached = num_tokens

    def extend(self, sequence: ActiveSequence) -> bool:
        """Give a sequence the block that its next position is in.

        Returns:
            Whether it has one; False if no block is free.
        """
        num_blocks = self._decoding.blocks_for(sequence.num_cached + 1)
        if num_blocks <= len(sequence.blocks):
            return True
        if not self.make_room(1):
            return False
        if not sequence.planned:
            self._move(sequence)
        sequence.blocks += self._take(1, sequence.planned[:1])
        sequence.planned = sequence.planned[1:]
        return True

    def _move(self, sequence: ActiveSequence) -> None:
        """Copy a sequence to where it has room to grow, if there is such a place."""
        num_left = sequence.order.request.max_tokens - len(sequence.logprobs)
        num_blocks = len(sequence.blocks)
        run = self._pool.take_run(num_blocks, _num_planned(num_blocks, num_left))
        if run is None:
            return
        blocks, sequence.planned = run
        self._copy(sequence.blocks, blocks)
        self._pool.release(sequence.blocks)
        sequence.blocks = blocks

    def leave(self, sequence: ActiveSequence) -> None:
        """Let go of the blocks of a sequence."""
        self._pool.release(sequence.blocks)
        self._pool.unplan(sequence.planned)
        sequence.blocks, sequence.planned = [], []

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks."""
        self._pool.release(blocks)

    def distrust(self, blocks: Sequence[int]) -> None:
        """Note that blocks may hold numbers which are not finite.

        Attention multiplies what lies behind a sequence by 0, and 0 times NaN is NaN: the next
        sequence in a block would suffer from weights that are not its own.
        """
        self.prompts.forget(blocks)
        self._pool.distrust(blocks)

    def distrust_all(self) -> None:
        """Read every prompt anew, and clear every block before it is used again."""
        self.prompts.clear()
        self._pool.distrust()

    def _take(self, count: int, preferred: Sequence[int] = ()) -> list[int]:
        blocks = self._pool.take(count, preferred)
        self._clear(blocks)
        return blocks

    def _clear(self, blocks: Sequence[int]) -> None:
        unclean = self._pool.clean(blocks)
        if unclean:
            self._decoding.clear(unclean)

    def _copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        if targets:
            # Every number is overwritten, by ones as good as those of the source.
            self._pool.clean(targets)
            self._decoding.copy(sources, targets)


def _num_planned(num_blocks: int, max_tokens: int) -> int:
    """Return how many blocks to plan behind so many: as many again, if it may come to that."""
    return min(max(num_blocks, _MIN_PLANNED), blocks_for(max_tokens)) if num_blocks else 0


def _is_scored(order: Order) -> bool:
    request: SampleRequest = order.request
    return wants_scores(request) and not order.is_read
