"""The embedded sampler: continuous batching over immutable weight versions.

`step` admits waiting requests into free slots, then makes one token for every active sequence. A
prompt is read once for all of its samples, and not again while a slot still holds it
(`prompt_cache.py`). Sequences come and go without touching their neighbours: shapes, random
numbers and attention of a row depend on the row alone. A request gives the same bits in a full
batch as by itself.

A request holds the version that it samples from. One that follows its run may be given a newer
version between two steps: the keys and values of its earlier tokens stay, and each token carries
the version that produced it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from tinsmith_engine.base.types import Published
from tinsmith_engine.loading.hf_fallback import FallbackModel
from tinsmith_engine.model.decoder import Decoder
from tinsmith_engine.model.lm_head import log_probabilities
from tinsmith_engine.packing.images import rope_shift
from tinsmith_engine.sampling.decode_step import (
    CachedDecoding,
    DecodeSequence,
    Decoding,
    RecomputeDecoding,
)
from tinsmith_engine.sampling.kv_cache import cache_bytes_per_token
from tinsmith_engine.sampling.prefix_cache import PromptCache, PromptKey
from tinsmith_engine.sampling.prompt_logprobs import (
    first_scored_position,
    score_prompt,
    wants_scores,
)
from tinsmith_engine.sampling.sample_request import (
    PromptLogprobs,
    SampledSequence,
    SampledToken,
    SampleRequest,
    TokenListener,
    place_prompt,
    validate_sample_request,
)
from tinsmith_engine.sampling.stop_search import StopSearch
from tinsmith_engine.sampling.token_selection import PickRule, pick, uniform
from tinsmith_engine.training.engine import Engine

_USUAL_TOKENS = 512


@dataclass(slots=True, eq=False)
class _Order:
    """A request that has not ended."""

    id: int
    request: SampleRequest
    weights: Published | None
    """What its next token is sampled from."""
    listener: TokenListener | None
    num_unfinished: int
    is_read: bool = False
    """Whether its prompt was read, and so its scores are known."""
    prompt: PromptLogprobs | None = None
    num_cached_tokens: int = 0

    @property
    def version(self) -> int:
        return 0 if self.weights is None else self.weights.version


@dataclass(slots=True)
class _Group:
    """Samples of one request that are admitted together."""

    order: _Order
    samples: range


@dataclass(slots=True, eq=False)
class _Sequence:
    """One sequence that is being sampled."""

    order: _Order
    sample_index: int
    slot: int
    tokens: list[int]
    """Prompt and completion."""
    rope_shift: int
    """What the rotary position of the completion is ahead of the number of tokens."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    topk: list[list[tuple[int, float]]] = field(default_factory=list)
    stop_search: StopSearch | None = None

    @property
    def completion(self) -> list[int]:
        return self.tokens[len(self.order.request.prompt_tokens) :]

    def rule(self) -> PickRule:
        request = self.order.request
        drawn = uniform(request.seed, self.sample_index, len(self.logprobs))
        return PickRule(request.temperature, request.top_k, request.top_p, drawn)


class Sampler:
    """Samples from an engine's base model and published versions.

    Args:
        engine: Holds the model and the versions. Called by the same single thread.
        max_sequences: How many sequences are sampled at a time.
        max_prefill_tokens: Prompt tokens read in one step, so that long prompts do not hold up
            the sequences that are being sampled; a longer prompt gets a step of its own.
    """

    def __init__(
        self, engine: Engine, *, max_sequences: int = 64, max_prefill_tokens: int = 4096
    ) -> None:
        self._info, self._versions = engine.info, engine.versions
        self._is_outdated = engine.is_outdated
        self._max_prefill_tokens = max_prefill_tokens
        self._decoding = _decoding(engine, max_sequences)
        self._max_sequences = max_sequences
        self._free = list(range(max_sequences))
        self._unclean: set[int] = set()
        """Slots that may hold numbers which are not finite."""
        self._prompts = PromptCache()
        self._waiting: deque[_Group] = deque()
        self._active: list[_Sequence] = []
        self._orders: dict[int, _Order] = {}
        self._following: dict[int, _Order] = {}
        self._num_requests = 0

    @property
    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._waiting or self._active)

    @property
    def num_active(self) -> int:
        """How many sequences are in a slot."""
        return len(self._active)

    def add(self, request: SampleRequest, listener: TokenListener | None = None) -> int:
        """Queue a request and return its id; the request holds its version until it ends.

        Args:
            request: What is asked for.
            listener: Is told of each token as it is made.

        Raises:
            InvalidArgumentError: See `validate_sample_request`.
            SequenceTooLongError: The prompt exceeds the context of the model.
            VersionNotLoadedError: The request's version has no holder any more.
        """
        request = place_prompt(request, self._info, "prompt_tokens")
        validate_sample_request(request, self._info)
        if request.weights is not None:
            self._versions.acquire(request.weights)
        self._num_requests += 1
        order = _Order(self._num_requests, request, request.weights, listener, request.num_samples)
        self._orders[order.id] = order
        if request.follows_run and request.weights is not None:
            self._following[order.id] = order
        for first in range(0, request.num_samples, self._max_sequences):
            samples = range(first, min(first + self._max_sequences, request.num_samples))
            self._waiting.append(_Group(order, samples))
        return order.id

    def cancel(self, request_id: int) -> None:
        """Forget a request and what it sampled; an unknown or finished id is no error."""
        order = self._orders.get(request_id)
        if order is None:
            return
        self._free += [sequence.slot for sequence in self._active if sequence.order is order]
        self._active = [sequence for sequence in self._active if sequence.order is not order]
        self._waiting = deque(group for group in self._waiting if group.order is not order)
        self._forget(order)

    def update(self, request_id: int, weights: Published) -> bool:
        """Sample the tokens to come of a request from other weights of its run.

        Prompts of samples that did not begin yet are read with the new weights.

        Returns:
            Whether anything changed: not for an unknown or finished id, a request that does not
            follow its run, or the weights that it has.

        Raises:
            VersionNotLoadedError: The version has no holder any more; the request keeps its own.
        """
        order = self._following.get(request_id)
        if order is None or order.weights is None or order.weights == weights:
            return False
        self._versions.acquire(weights)
        previous, order.weights = order.weights, weights
        self._versions.release(previous)
        return True

    def outdated(self) -> set[Published]:
        """Return the versions of requests that follow a run which has newer weights by now."""
        followed = {order.weights for order in self._following.values()}
        return {one for one in followed if one is not None and self._is_outdated(one)}

    def progress(self, request_id: int) -> list[SampledSequence]:
        """Return the sequences of a request that are still growing, as far as they are."""
        return [
            _sequence(sequence, None)
            for sequence in self._active
            if sequence.order.id == request_id
        ]

    def forget_prompts(self) -> None:
        """Read every prompt anew, as after a failure that may have left damage."""
        self._prompts.clear()
        self._unclean.update(range(self._max_sequences))

    def step(self) -> list[SampledSequence]:
        """Admit what fits, make one token for every active sequence, return what finished."""
        finished = self._admit()
        if self._active:
            sequences = self._active
            logits = self._decoding.decode(
                [
                    DecodeSequence(
                        sequence.slot, sequence.order.weights, sequence.tokens, sequence.rope_shift
                    )
                    for sequence in sequences
                ]
            )
            finished += self._take_tokens(sequences, logits)
        return finished

    def _admit(self) -> list[SampledSequence]:
        finished: list[SampledSequence] = []
        num_tokens = 0
        while self._waiting and len(self._waiting[0].samples) <= len(self._free):
            num_tokens += len(self._waiting[0].order.request.prompt_tokens)
            if num_tokens > self._max_prefill_tokens and (finished or self._active):
                break
            finished += self._start(self._waiting.popleft())
        return finished

    def _start(self, group: _Group) -> list[SampledSequence]:
        order, request = group.order, group.order.request
        slots, last = self._read_prompt(order, len(group.samples))
        shift = rope_shift(request.images)
        sequences = [
            _Sequence(
                order,
                sample,
                slot,
                list(request.prompt_tokens),
                shift,
                stop_search=_stop_search(request),
            )
            for sample, slot in zip(group.samples, slots, strict=True)
        ]
        self._active = self._active + sequences
        if self._limit(request) == 0:
            if not last.isfinite().all():
                self._distrust(slots)
            return [self._finish(sequence, "length") for sequence in sequences]
        return self._take_tokens(sequences, last.expand(len(sequences), -1))

    def _read_prompt(self, order: _Order, num_samples: int) -> tuple[list[int], Tensor]:
        """Put a prompt into slots; return them and the logits [1, V] after it."""
        request = order.request
        num_tokens = len(request.prompt_tokens)
        is_scored = wants_scores(request) and not order.is_read
        # Images are part of what was read, and not among the tokens.
        key = None
        if not request.images:
            key = PromptKey(request.cache_scope, order.weights, tuple(request.prompt_tokens))
        known = None if key is None or is_scored else self._prompts.find(key)
        slots = self._take_slots(num_samples, None if known is None else known.slot)
        try:
            self._clean(slots)
            if known is not None:
                self._decoding.copy_prompt(known.slot, slots, num_tokens)
                last, prompt = known.last_logits, None
            else:
                first = first_scored_position(request) if is_scored else num_tokens - 1
                last, chunks = self._decoding.prefill(
                    order.weights, request.prompt_tokens, slots, request.images, first_scored=first
                )
                prompt = score_prompt(request, chunks) if is_scored else None
        except BaseException:
            self._prompts.forget(slots)
            self._free += slots
            raise
        if key is not None and known is None:
            # A copy: this is a view of all the rows that were computed with it.
            self._prompts.add(key, slots[0], last.clone())
        if not order.is_read:
            order.is_read, order.prompt = True, prompt
            order.num_cached_tokens = 0 if known is None else num_tokens
            if order.listener is not None:
                order.listener.begin(prompt, order.num_cached_tokens, order.version)
        return slots, last

    def _take_slots(self, count: int, known: int | None) -> list[int]:
        """Take free slots to write to, the one that holds the prompt among them if it is free."""
        ranked = self._prompts.rank(self._free)
        if known in self._free:
            ranked = [known, *(slot for slot in ranked if slot != known)]
        slots = sorted(ranked[:count])
        self._free = [slot for slot in self._free if slot not in slots]
        self._prompts.forget(slot for slot in slots if slot != known)
        return slots

    def _distrust(self, slots: Sequence[int]) -> None:
        """Note that slots may hold numbers which are not finite.

        Attention multiplies what lies behind a sequence by 0, and 0 times NaN is NaN: the next
        sequence in the slot would suffer from weights that are not its own.
        """
        self._prompts.forget(slots)
        self._unclean.update(slots)

    def _clean(self, slots: Sequence[int]) -> None:
        unclean = self._unclean.intersection(slots)
        if unclean:
            self._decoding.clear(sorted(unclean))
            self._unclean -= unclean

    def _limit(self, request: SampleRequest) -> int:
        """Return the longest completion that the request and the context allow."""
        room = self._info.max_context_tokens - len(request.prompt_tokens)
        return min(request.max_tokens, room)

    def _take_tokens(
        self, sequences: Sequence[_Sequence], logits_RV: Tensor
    ) -> list[SampledSequence]:
        chosen_R = pick(logits_RV, [sequence.rule() for sequence in sequences])
        log_softmax_RV = log_probabilities(logits_RV)
        logprobs_R = log_softmax_RV.gather(1, chosen_R[:, None])[:, 0]
        finished = []
        for index, (sequence, token, logprob) in enumerate(
            zip(sequences, chosen_R.tolist(), logprobs_R.tolist(), strict=True)
        ):
            topk = _likeliest(log_softmax_RV[index], sequence.order.request.topk_sample_logprobs)
            reason = self._take(
                sequence, SampledToken(token, logprob, sequence.order.version, topk)
            )
            if reason is not None:
                finished.append(self._finish(sequence, reason))
        return finished

    def _take(self, sequence: _Sequence, sampled: SampledToken) -> str | None:
        if not np.isfinite(sampled.logprob):
            return "error"
        order, request = sequence.order, sequence.order.request
        sequence.tokens.append(sampled.token)
        sequence.logprobs.append(sampled.logprob)
        sequence.versions.append(sampled.version)
        sequence.topk.append(sampled.topk)
        if order.listener is not None:
            order.listener.token(sequence.sample_index, sampled)
        search = sequence.stop_search
        if sampled.token in request.stop_tokens or (search and search.push(sampled.token)):
            return "stop"
        return "length" if len(sequence.logprobs) >= self._limit(request) else None

    def _finish(self, sequence: _Sequence, reason: str) -> SampledSequence:
        order = sequence.order
        self._active = [other for other in self._active if other is not sequence]
        self._free.append(sequence.slot)
        if reason == "error":
            self._distrust([sequence.slot])
        if order.listener is not None:
            order.listener.end(sequence.sample_index, reason)
        order.num_unfinished -= 1
        if order.num_unfinished == 0:
            self._forget(order)
        return _sequence(sequence, reason)

    def _forget(self, order: _Order) -> None:
        del self._orders[order.id]
        self._following.pop(order.id, None)
        if order.weights is not None:
            self._versions.release(order.weights)


def sequences_within(engine: Engine, cache_bytes: int) -> int | None:
    """Return how many sequences of usual length a cache of this size holds.

    None where the model is sampled without a cache.
    """
    if not isinstance(engine.model, Decoder):
        return None
    dtype = engine.model.initial_parameters().dtype
    per_sequence = cache_bytes_per_token(engine.model.config, dtype) * _USUAL_TOKENS
    return max(cache_bytes // per_sequence, 1)


def _decoding(engine: Engine, max_sequences: int) -> Decoding:
    if isinstance(engine.model, Decoder):
        return CachedDecoding(engine.model, engine.base, engine.versions, max_sequences)
    if isinstance(engine.model, FallbackModel):
        return RecomputeDecoding(engine.model, engine.versions)
    raise TypeError(f"no sampler for a {type(engine.model).__name__}")


def _stop_search(request: SampleRequest) -> StopSearch | None:
    if not request.stop_strings or request.decode_text is None:
        return None
    return StopSearch(request.stop_strings, request.decode_text)


def _likeliest(log_softmax_V: Tensor, count: int) -> list[tuple[int, float]]:
    """Return the likeliest tokens of one row, likeliest first."""
    if count == 0:
        return []
    # One row at a time: which of two equal tokens `topk` returns may depend on the shape.
    values, ids = log_softmax_V.topk(count)
    return list(zip(ids.tolist(), values.tolist(), strict=True))


def _sequence(sequence: _Sequence, reason: str | None) -> SampledSequence:
    order = sequence.order
    return SampledSequence(
        request_id=order.id,
        sample_index=sequence.sample_index,
        tokens=sequence.completion,
        logprobs=np.asarray(sequence.logprobs, dtype=np.float32),
        versions=list(sequence.versions),
        finish_reason=reason,
        prompt=order.prompt,
        topk=list(sequence.topk) if order.request.topk_sample_logprobs > 0 else None,
        num_cached_prompt_tokens=order.num_cached_tokens,
    )
