"""The embedded sampler: continuous batching over immutable weight versions.

`step` admits waiting requests into free slots, then makes one token for every active sequence. A
prompt is read once for all of its samples. Sequences come and go without touching their neighbours:
shapes, random numbers and attention of a row depend on the row alone, so a request gives the same
bits in a full batch as by itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.decoder import Decoder
from tinsmith_engine.decoding import CachedDecoding, DecodeRow, Decoding, RecomputeDecoding
from tinsmith_engine.engine import Engine
from tinsmith_engine.fallback import FallbackModel
from tinsmith_engine.head import log_probabilities
from tinsmith_engine.images import rope_shift
from tinsmith_engine.kv_cache import cache_bytes_per_token
from tinsmith_engine.picking import PickRule, pick, uniform
from tinsmith_engine.requests import (
    PromptLogprobs,
    SampledSequence,
    SampleRequest,
    place_prompt,
    validate_sample_request,
)

# A token may be a single byte of a 4-byte character, and a decoder may drop incomplete ones.
_TOKENS_PER_CHARACTER, _SPARE_TOKENS = 4, 8
_USUAL_TOKENS = 512


@dataclass(slots=True)
class _Group:
    """Samples of one request that are admitted together."""

    request_id: int
    request: SampleRequest
    samples: range


@dataclass(slots=True)
class _Row:
    """One sequence that is being sampled."""

    request_id: int
    request: SampleRequest
    sample_index: int
    slot: int
    tokens: list[int]
    """Prompt and completion."""
    prompt: PromptLogprobs | None
    rope_shift: int
    """What the rotary position of the completion is ahead of the number of tokens."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    @property
    def completion(self) -> list[int]:
        return self.tokens[len(self.request.prompt_tokens) :]

    def rule(self) -> PickRule:
        request = self.request
        drawn = uniform(request.seed, self.sample_index, len(self.logprobs))
        return PickRule(request.temperature, request.top_k, request.top_p, drawn)


class Sampler:
    """Samples from an engine's base model and published versions.

    Args:
        engine: Holds the model and the versions. Called by the same single thread.
        max_rows: How many sequences are sampled at a time.
        max_prefill_tokens: Prompt tokens read in one step, so that long prompts do not hold up
            the sequences that are being sampled; a longer prompt gets a step of its own.
    """

    def __init__(
        self, engine: Engine, *, max_rows: int = 64, max_prefill_tokens: int = 4096
    ) -> None:
        self._info, self._versions = engine.info, engine.versions
        self._max_prefill_tokens = max_prefill_tokens
        self._decoding = _decoding(engine, max_rows)
        self._max_rows = max_rows
        self._free = list(range(max_rows))
        self._waiting: deque[_Group] = deque()
        self._active: list[_Row] = []
        self._num_unfinished: dict[int, int] = {}
        self._requests: dict[int, SampleRequest] = {}
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._waiting or self._active)

    def add(self, request: SampleRequest) -> int:
        """Queue a request and return its id; the request holds its version until it ends.

        Raises:
            InvalidArgumentError: See `validate_sample_request`.
            SequenceTooLongError: The prompt exceeds the context of the model.
            VersionNotLoadedError: Nobody holds the request's version any more.
        """
        request = place_prompt(request, self._info, "prompt_tokens")
        validate_sample_request(request, self._info)
        if request.weights is not None:
            self._versions.acquire(request.weights)
        self._num_requests += 1
        request_id = self._num_requests
        self._requests[request_id] = request
        self._num_unfinished[request_id] = request.num_samples
        for first in range(0, request.num_samples, self._max_rows):
            samples = range(first, min(first + self._max_rows, request.num_samples))
            self._waiting.append(_Group(request_id, request, samples))
        return request_id

    def cancel(self, request_id: int) -> None:
        """Forget a request and what it sampled; an unknown or finished id is no error."""
        if request_id not in self._requests:
            return
        for row in self._active:
            if row.request_id == request_id:
                self._free.append(row.slot)
        self._active = [row for row in self._active if row.request_id != request_id]
        self._waiting = deque(g for g in self._waiting if g.request_id != request_id)
        self._forget(request_id)

    def progress(self, request_id: int) -> list[SampledSequence]:
        """Return the sequences of a request that are still growing, as far as they are."""
        return [_sequence(row, None) for row in self._active if row.request_id == request_id]

    def step(self) -> list[SampledSequence]:
        """Admit what fits, make one token for every active sequence, return what finished."""
        finished = self._admit()
        if self._active:
            rows = self._active
            logits = self._decoding.decode(
                [
                    DecodeRow(row.slot, row.request.weights, row.tokens, row.rope_shift)
                    for row in rows
                ]
            )
            finished += self._take_tokens(rows, logits)
        return finished

    def _admit(self) -> list[SampledSequence]:
        finished: list[SampledSequence] = []
        num_tokens = 0
        while self._waiting and len(self._waiting[0].samples) <= len(self._free):
            num_tokens += len(self._waiting[0].request.prompt_tokens)
            if num_tokens > self._max_prefill_tokens and (finished or self._active):
                break
            finished += self._start(self._waiting.popleft())
        return finished

    def _start(self, group: _Group) -> list[SampledSequence]:
        request = group.request
        # The lowest free slots: samples of a prompt then tend to lie side by side.
        self._free.sort()
        slots, self._free = self._free[: len(group.samples)], self._free[len(group.samples) :]
        scores_prompt = request.prompt_logprobs or request.topk_prompt_logprobs > 0
        chunks = self._decoding.prefill(
            request.weights, request.prompt_tokens, slots, request.images, all_=scores_prompt
        )
        prompt, last = _read_prompt(request, chunks)
        shift = rope_shift(request.images)
        rows = [
            _Row(
                group.request_id, request, sample, slot, list(request.prompt_tokens), prompt, shift
            )
            for sample, slot in zip(group.samples, slots, strict=True)
        ]
        self._active = self._active + rows
        if self._limit(request) == 0:
            return [self._finish(row, "length") for row in rows]
        return self._take_tokens(rows, last.expand(len(rows), -1))

    def _limit(self, request: SampleRequest) -> int:
        """Return the longest completion that the request and the context allow."""
        room = self._info.max_context_tokens - len(request.prompt_tokens)
        return min(request.max_tokens, room)

    def _take_tokens(self, rows: Sequence[_Row], logits_RV: Tensor) -> list[SampledSequence]:
        chosen_R = pick(logits_RV, [row.rule() for row in rows])
        logprobs_R = log_probabilities(logits_RV).gather(1, chosen_R[:, None])[:, 0]
        finished = []
        for row, token, logprob in zip(rows, chosen_R.tolist(), logprobs_R.tolist(), strict=True):
            reason = self._take(row, token, logprob)
            if reason is not None:
                finished.append(self._finish(row, reason))
        return finished

    def _take(self, row: _Row, token: int, logprob: float) -> str | None:
        if not np.isfinite(logprob):
            return "error"
        request = row.request
        row.tokens.append(token)
        row.logprobs.append(logprob)
        row.versions.append(0 if request.weights is None else request.weights.version)
        if token in request.stop_tokens or _has_stop_string(row):
            return "stop"
        return "length" if len(row.logprobs) >= self._limit(request) else None

    def _finish(self, row: _Row, reason: str) -> SampledSequence:
        self._active = [other for other in self._active if other is not row]
        self._free.append(row.slot)
        self._num_unfinished[row.request_id] -= 1
        if self._num_unfinished[row.request_id] == 0:
            self._forget(row.request_id)
        return _sequence(row, reason)

    def _forget(self, request_id: int) -> None:
        request = self._requests.pop(request_id)
        del self._num_unfinished[request_id]
        if request.weights is not None:
            self._versions.release(request.weights)


def rows_within(engine: Engine, cache_bytes: int) -> int | None:
    """Return how many sequences of usual length a cache of this size holds.

    None where the model is sampled without a cache.
    """
    if not isinstance(engine.model, Decoder):
        return None
    dtype = engine.model.initial_row().dtype
    per_row = cache_bytes_per_token(engine.model.config, dtype) * _USUAL_TOKENS
    return max(cache_bytes // per_row, 1)


def _decoding(engine: Engine, max_rows: int) -> Decoding:
    if isinstance(engine.model, Decoder):
        return CachedDecoding(engine.model, engine.base, engine.versions, max_rows)
    if isinstance(engine.model, FallbackModel):
        return RecomputeDecoding(engine.model, engine.versions)
    raise TypeError(f"no sampler for a {type(engine.model).__name__}")


def _read_prompt(
    request: SampleRequest, chunks: Iterable[Tensor]
) -> tuple[PromptLogprobs | None, Tensor]:
    """Return the prompt's scores, if asked for, and the logits [1, V] after its last token."""
    tokens, count = request.prompt_tokens, request.topk_prompt_logprobs
    logprobs: list[float | None] = [None]
    topk: list[list[tuple[int, float]] | None] = [None]
    if not (request.prompt_logprobs or count > 0):
        (last,) = chunks
        return None, last
    for logits in chunks:
        last = logits[-1:]
        log_softmax = log_probabilities(logits)
        # Position i predicts token i + 1; what follows the prompt is for the completion.
        nexts = list(tokens[len(logprobs) : len(logprobs) + len(logits)])
        log_softmax = log_softmax[: len(nexts)]
        targets = torch.tensor(nexts, dtype=torch.int64, device=logits.device)[:, None]
        logprobs += log_softmax.gather(1, targets)[:, 0].tolist()
        if count > 0:
            values, ids = log_softmax.topk(count, dim=1)
            pairs = zip(ids.tolist(), values.tolist(), strict=True)
            topk += [list(zip(*pair, strict=True)) for pair in pairs]
    return PromptLogprobs(logprobs if request.prompt_logprobs else [], topk if count else []), last


def _has_stop_string(row: _Row) -> bool:
    request = row.request
    if not request.stop_strings or request.decode_text is None:
        return False
    longest = max(len(text) for text in request.stop_strings)
    # Earlier tokens were looked at before: a new match ends in the newest token.
    window = row.completion[-(longest * _TOKENS_PER_CHARACTER + _SPARE_TOKENS) :]
    text = request.decode_text(window)
    return any(stop in text for stop in request.stop_strings)


def _sequence(row: _Row, reason: str | None) -> SampledSequence:
    return SampledSequence(
        request_id=row.request_id,
        sample_index=row.sample_index,
        tokens=row.completion,
        logprobs=np.asarray(row.logprobs, dtype=np.float32),
        versions=list(row.versions),
        finish_reason=reason,
        prompt=row.prompt,
    )
