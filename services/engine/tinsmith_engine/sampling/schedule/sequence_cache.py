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
from tinsmith_engine.sampling.cache.block_pool import BLOCK_TOKENS, BlockPool, blocks_for
from tinsmith_engine.sampling.cache.prefix_cache import PromptCache, digests_of_blocks
from tinsmith_engine.sampling.decode.decode_step import Decoding, PromptPiece
from tinsmith_engine.sampling.decode.prompt_logprobs import (
    PromptScores,
    first_scored_position,
    wants_scores,
)
from tinsmith_engine.sampling.request.sample_request import PromptLogprobs, SampleRequest
from tinsmith_engine.sampling.schedule.sequences import (
    ActiveSequence,
    Reading,
    RequestState,
    WaitingGroup,
)

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
    """Sequences in the blocks of a cache."""

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

    def is_known(self, state: RequestState) -> bool:
        """Whether the prompt of a request need not be read."""
        return state.key in self.prompts and not _is_scored(state)

    def blocks_to_resume(self, sequence: ActiveSequence) -> int:
        """Return how many blocks a sequence that gave way needs to read all of its tokens again."""
        num_blocks = self._decoding.blocks_for(len(sequence.tokens))
        return max(num_blocks, self.blocks_to_begin(sequence.state, 1))

    def blocks_to_begin(self, state: RequestState, num_samples: int) -> int:
        """Return how many blocks samples need for the prompt and the first step behind it."""
        request = state.request
        num_tokens = len(request.prompt_tokens)
        num_blocks = 0 if self.is_known(state) else self._decoding.blocks_for(num_tokens)
        if request.max_tokens <= 1 or not self._pool.num_blocks:
            return num_blocks
        # The first of them writes into the last block of a prompt that it read, if it has room.
        has_room = num_tokens % BLOCK_TOKENS != 0 and num_blocks > 0
        return num_blocks + num_samples - has_room

    def make_room_for(self, state: RequestState, num_samples: int) -> bool:
        """Let go of known prompts until samples can begin; return whether they can."""
        if state.key is not None:
            self.prompts.find(state.key)
        while self.make_room(num_blocks := self.blocks_to_begin(state, num_samples)):
            # The prompt may have been known until room was made.
            if num_blocks >= self.blocks_to_begin(state, num_samples):
                return True
        return False

    def make_room(self, num_blocks: int) -> bool:
        """Let go of known prompts until as many blocks are free; return whether they are."""
        while self._pool.num_free < num_blocks:
            if not self.prompts.forget_oldest():
                return False
        return True

    def known(self, state: RequestState) -> ReadPrompt:
        """Return the prompt of a request that is known; its listener is told if that is new."""
        known = None if state.key is None else self.prompts.find(state.key)
        if known is None:
            raise AssertionError("a prompt that is known is found")
        self._pool.share(known.blocks)
        self._tell(state, None, len(state.request.prompt_tokens))
        shift = rope_shift(state.request.images)
        return ReadPrompt(list(known.blocks), known.last_logits, shift, [], is_known=True)

    def begin_reading(self, group: WaitingGroup) -> Reading:
        """Give a prompt its blocks, and what is known of its beginning; there must be room."""
        state = group.state
        request = state.request
        num_tokens = len(request.prompt_tokens)
        scores = PromptScores(request) if _is_scored(state) else None
        beginning = [] if scores is not None else self._known_beginning(state)
        num_blocks = self._decoding.blocks_for(num_tokens)
        run = self._pool.take_run(num_blocks, _num_planned(num_blocks, request.max_tokens))
        blocks, planned = run or (self._pool.take(num_blocks), [])
        self._copy(beginning, blocks[: len(beginning)])
        num_known = len(beginning) * BLOCK_TOKENS
        return Reading(group, state.weights, blocks, planned, num_known, num_known, scores)

    def _known_beginning(self, state: RequestState) -> list[int]:
        """Return the known blocks of a prompt; its last token is read in any case."""
        if state.key is None or not self._decoding.cuts_prompts:
            return []
        digests = digests_of_blocks(state.key.tokens[:-1])
        return self.prompts.find_beginning(state.key.scope, state.weights, digests)

    def size_of_piece(self, reading: Reading, most: int) -> int:
        """Return how many tokens of a prompt are read next: at most so many."""
        # An image is not cut, so its prompt is not.
        may_cut = self._decoding.cuts_prompts and not reading.state.request.images
        return min(reading.num_left, most) if may_cut else reading.num_left

    def read(self, pieces: Sequence[tuple[Reading, int]]) -> None:
        """Read a number of tokens of each of some prompts, in one pass."""
        for reading, num_tokens in pieces:
            reading.is_pure &= reading.weights == reading.state.weights
            # Piece by piece: to clear all of a long prompt takes longer than a step.
            # The last block of the piece before has what that one wrote.
            start, stop = (
                self._decoding.blocks_for(count)
                for count in (reading.num_read, reading.num_read + num_tokens)
            )
            self._clear(reading.blocks[start:stop])
        read = self._decoding.prefill([_piece(*one) for one in pieces])
        for (reading, num_tokens), found in zip(pieces, read, strict=True):
            reading.num_read += num_tokens
            # A copy: this is a view of all the rows that were computed with it.
            reading.last_logits = None if found.last is None else found.last.clone()
            if reading.scores is not None:
                for first, logits in found.scored:
                    reading.scores.add(first, logits)

    def finish(self, reading: Reading) -> ReadPrompt:
        """Return a prompt that is read; the listener of the request is told the first time."""
        state, last = reading.state, reading.last_logits
        if last is None:
            raise AssertionError("a prompt that is not read to its end has no logits")
        if state.key is not None and reading.is_pure:
            self.prompts.add(state.key, reading.blocks, last)
        scores = None if reading.scores is None else reading.scores.found()
        self._tell(state, scores, reading.num_known)
        shift = rope_shift(state.request.images)
        return ReadPrompt(reading.blocks, last, shift, reading.planned, is_known=False)

    def _tell(self, state: RequestState, scores: PromptLogprobs | None, num_cached: int) -> None:
        if state.is_read:
            return
        state.is_read, state.prompt, state.num_cached_tokens = True, scores, num_cached
        if state.listener is not None:
            state.listener.begin(scores, num_cached, state.version)

    def abandon(self, reading: Reading) -> None:
        """Let go of the blocks of a prompt that is not read to its end.

        What was written led to no logits yet, so it may not be finite.
        """
        self.distrust(reading.blocks)
        self._pool.release(reading.blocks)
        self._pool.unplan(reading.planned)
        reading.blocks, reading.planned = [], []

    def num_beginning(self, group: WaitingGroup, prompt: ReadPrompt) -> int:
        """Return how many samples of a group may begin behind a prompt that was read for them."""
        request = group.state.request
        num_shared = len(prompt.blocks)
        if num_shared and request.max_tokens > 1:
            num_shared = len(request.prompt_tokens) // BLOCK_TOKENS
        num_own = len(prompt.blocks) - num_shared
        if num_own == 0:
            return len(group.samples)
        # The first takes the blocks of the prompt as they are.
        self.make_room((len(group.samples) - 1) * num_own)
        return min(len(group.samples), 1 + self._pool.num_free // num_own)

    def keep(self, sequence: ActiveSequence) -> None:
        """Let what a sequence has cached be found by prompts that begin with it."""
        state = sequence.state
        if state.key is None or state.has_changed or not self._decoding.cuts_prompts:
            return
        self.prompts.add_beginning(
            state.key.scope,
            state.weights,
            sequence.tokens[: sequence.num_cached],
            sequence.blocks,
        )

    def adopt(self, begun: Sequence[ActiveSequence], prompt: ReadPrompt) -> None:
        """Give sequences the blocks of their prompt, of which the caller is a reader."""
        request = begun[0].state.request
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
        num_left = sequence.state.request.max_tokens - len(sequence.logprobs)
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


def _piece(reading: Reading, num_tokens: int) -> PromptPiece:
    """Return the next tokens of a prompt as they are to be read."""
    state = reading.state
    request = state.request
    last = len(request.prompt_tokens) - 1
    return PromptPiece(
        weights=state.weights,
        tokens=request.prompt_tokens,
        blocks=reading.blocks,
        start=reading.num_read,
        stop=reading.num_read + num_tokens,
        first_scored=last if reading.scores is None else first_scored_position(request),
        images=request.images,
    )


def _is_scored(state: RequestState) -> bool:
    request: SampleRequest = state.request
    return wants_scores(request) and not state.is_read
