"""Tokens on their way from the engine's thread to a reader on the event loop.

The engine's thread never waits: it adds what was made to what the reader has not taken yet and
wakes the reader once. A slow reader finds more in one piece. What can pile up is at most what the
request may sample, which a call that is not streamed holds as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tinsmith_engine import PromptLogprobs, SampledSequence, SampledToken


@dataclass(frozen=True, slots=True)
class PromptReport:
    """What is known once a prompt was read.

    Attributes:
        scores: Of the prompt; None if none were asked for.
        num_cached_tokens: Tokens that were not computed again.
        version: Of the weights that read it.
    """

    scores: PromptLogprobs | None
    num_cached_tokens: int
    version: int


@dataclass(slots=True)
class Piece:
    """The next tokens of one sample.

    Attributes:
        sample_index: Which sample it continues.
        token_index: At which token it begins.
        tokens: What was drawn, in order; may be empty in the last piece.
        reason: Why the sample ended; None if it goes on.
    """

    sample_index: int
    token_index: int
    tokens: list[SampledToken] = field(default_factory=list)
    reason: str | None = None

    def sequence(self, *, has_topk: bool) -> SampledSequence:
        """Return the piece as a sequence."""
        return SampledSequence(
            request_id=0,
            sample_index=self.sample_index,
            tokens=[one.token for one in self.tokens],
            logprobs=np.asarray([one.logprob for one in self.tokens], dtype=np.float32),
            versions=[one.version for one in self.tokens],
            finish_reason=self.reason,
            topk=[one.topk for one in self.tokens] if has_topk else None,
        )


@dataclass(frozen=True, slots=True)
class Delivery:
    """What a reader takes at once.

    Attributes:
        prompt: In the first delivery alone.
        pieces: At most one for each sample.
    """

    prompt: PromptReport | None
    pieces: list[Piece]


class TokenFeed:
    """The tokens of one request, for one reader. Built on the reader's event loop.

    Args:
        num_samples: Samples of the request.
        received: How many tokens of each sample the reader has from before; they are left out.
    """

    def __init__(self, num_samples: int, received: Sequence[int] = ()) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._received = list(received) or [0] * num_samples
        self._num_made = [0] * num_samples
        self._num_growing = num_samples
        self._fresh: dict[int, Piece] = {}
        self._lock = threading.Lock()
        # Under the lock from here on.
        self._ready: dict[int, Piece] = {}
        self._prompt: PromptReport | None = None
        self._error: Exception | None = None
        self._is_complete = False
        self._is_woken = False

    # On the engine's thread.

    def begin(self, prompt: PromptLogprobs | None, num_cached_tokens: int, version: int) -> None:
        """Note that the prompt was read, before any token."""
        with self._lock:
            self._prompt = PromptReport(prompt, num_cached_tokens, version)

    def token(self, sample_index: int, token: SampledToken) -> None:
        """Note the next token of a sample."""
        index = self._num_made[sample_index]
        self._num_made[sample_index] += 1
        if index >= self._received[sample_index]:
            self._piece(sample_index, index).tokens.append(token)

    def end(self, sample_index: int, reason: str) -> None:
        """Note why a sample ended, after its last token."""
        self._piece(sample_index, self._num_made[sample_index]).reason = reason
        self._num_growing -= 1

    def flush(self) -> None:
        """Give the reader what was noted since the last time."""
        if not self._fresh:
            return
        with self._lock:
            for index, piece in self._fresh.items():
                waiting = self._ready.setdefault(index, piece)
                if waiting is not piece:
                    waiting.tokens += piece.tokens
                    waiting.reason = piece.reason
            self._is_complete = self._num_growing == 0
            self._wake()
        self._fresh = {}

    def fail(self, error: Exception) -> None:
        """End the feed with an error, which the reader gets instead of what it did not take."""
        with self._lock:
            self._error = error
            self._wake()

    def _piece(self, sample_index: int, token_index: int) -> Piece:
        return self._fresh.setdefault(sample_index, Piece(sample_index, token_index))

    def _wake(self) -> None:
        if self._is_woken:
            return
        self._is_woken = True
        with contextlib.suppress(RuntimeError):  # The reader's loop was closed meanwhile.
            self._loop.call_soon_threadsafe(self._arrived.set)

    # On the event loop.

    async def take(self) -> Delivery | None:
        """Wait for something and return all there is; None once all samples have ended.

        Raises:
            Exception: The error that the feed failed with.
        """
        while True:
            self._arrived.clear()
            with self._lock:
                self._is_woken = False
                if self._error is not None:
                    raise self._error
                if self._ready:
                    delivery = Delivery(self._prompt, list(self._ready.values()))
                    self._ready, self._prompt = {}, None
                    return delivery
                if self._is_complete:
                    return None
            await self._arrived.wait()
