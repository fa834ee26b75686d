"""A request on its way through vLLM: a completion is a request of its own there.

The first completion goes ahead, so that the others find its prompt in the prefix cache. Stop tokens
and stop strings are looked for here: a completion ends with the same token as in another engine.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from tinsmith_engine import PromptLogprobs, SampledSequence, SampledToken, SampleRequest
from tinsmith_engine.sampling.request.stop_search import StopSearch
from tinsmith_sampler.engines.engine_protocol import Ticket
from tinsmith_sampler.vllm.messages import Adapter, Generate, LikeliestTokens, Update

_SEED_BYTES = 7


@dataclass(slots=True)
class _Sample:
    index: int
    search: StopSearch | None
    tokens: list[SampledToken] = field(default_factory=list)
    reason: str | None = None


class VllmRequest:
    """A request, and its completions so far.

    Args:
        ticket: The request.
        version: Of its weights; 0 for a base model.
        limit: Longest completion that request and context allow.
        adapter: What it is sampled with besides the base weights.
        cache_salt: Under what its prompt is known.
    """

    def __init__(
        self, ticket: Ticket, version: int, limit: int, adapter: Adapter | None, cache_salt: str
    ) -> None:
        self.ticket = ticket
        self.numbers: dict[int, int] = {}
        """By the name that a completion has in vLLM, its index."""
        self._version = version
        self._limit = limit
        self._adapter = adapter
        self._cache_salt = cache_salt
        request = ticket.request
        self._samples = [
            _Sample(index, StopSearch.of(request)) for index in range(request.num_samples)
        ]
        self._prompt: PromptLogprobs | None = None
        self._num_cached = 0
        self.is_begun = False
        """Whether its prompt was read."""

    @property
    def is_finished(self) -> bool:
        """Whether all completions have ended."""
        return len(self.ticket.finished) == len(self._samples)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed again."""
        return self._num_cached

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens of all completions so far."""
        return sum(len(sample.tokens) for sample in self._samples)

    @property
    def unfinished(self) -> list[int]:
        """Names of completions that vLLM still makes."""
        return [
            number for number, index in self.numbers.items() if self._samples[index].reason is None
        ]

    def first(self, numbers: Iterator[int]) -> Generate:
        """Return the command for the first completion."""
        return self._command(0, next(numbers))

    def others(self, numbers: Iterator[int]) -> list[Generate]:
        """Return the commands for the others, once the prompt was read; else nothing."""
        if not self.is_begun or len(self.numbers) > 1:
            return []
        return [
            self._command(sample.index, number)
            for sample, number in zip(self._samples[1:], numbers, strict=False)
        ]

    def _command(self, index: int, number: int) -> Generate:
        request = self.ticket.request
        self.numbers[number] = index
        has_scores = index == 0 and (request.prompt_logprobs or request.topk_prompt_logprobs > 0)
        return Generate(
            sample=number,
            prompt=list(request.prompt_tokens),
            max_tokens=max(self._limit, 1),
            min_tokens=min(request.min_tokens, max(self._limit, 1)),
            temperature=request.temperature,
            top_k=request.top_k,
            top_p=request.top_p,
            seed=_seed_of(request.seed, index),
            stop_tokens=list(request.stop_tokens),
            num_likeliest=request.topk_sample_logprobs,
            num_prompt_likeliest=request.topk_prompt_logprobs if has_scores else None,
            adapter=self._adapter,
            cache_salt=self._cache_salt,
        )

    def take(self, update: Update) -> int | None:
        """Note what a step brought.

        Returns:
            The name of a completion that has ended here and not yet in vLLM, if it is so.
        """
        sample = self._samples[self.numbers[update.sample]]
        if sample.reason is not None:
            return None
        if not self.is_begun:
            self._begin(update)
        if self._limit <= 0:
            self._end(sample, "length")
            return update.sample if update.finish_reason is None else None
        rows = zip(update.tokens, update.logprobs, update.likeliest, strict=True)
        for token, logprob, likeliest in rows:
            reason = self._add(sample, token, logprob, likeliest)
            if reason is not None:
                self._end(sample, reason)
                return update.sample if update.finish_reason is None else None
        if update.finish_reason is not None:
            self._end(sample, "length" if update.finish_reason == "length" else "error")
        return None

    def _begin(self, update: Update) -> None:
        self.is_begun = True
        self._num_cached = update.num_cached_tokens
        request = self.ticket.request
        if update.prompt_logprobs is not None and update.prompt_likeliest is not None:
            self._prompt = _scores(request, update.prompt_logprobs, update.prompt_likeliest)
        if self.ticket.feed is not None:
            self.ticket.feed.begin(self._prompt, self._num_cached, self._version)

    def _add(
        self, sample: _Sample, token: int, logprob: float, likeliest: LikeliestTokens
    ) -> str | None:
        """Note a token; return why the completion ends with it, if it does."""
        if not math.isfinite(logprob):
            return "error"
        request = self.ticket.request
        # vLLM lists the sampled token beside the likeliest ones.
        topk = likeliest[: request.topk_sample_logprobs]
        sampled = SampledToken(token, logprob, self._version, topk)
        sample.tokens.append(sampled)
        if self.ticket.feed is not None:
            self.ticket.feed.token(sample.index, sampled)
        if sample.search is not None and len(sample.tokens) <= request.min_tokens:
            sample.search.pass_over(token)
        elif sample.search is not None and sample.search.push(token):
            return "stop"
        if token in request.stop_tokens:
            return "stop"
        return "length" if len(sample.tokens) >= self._limit else None

    def _end(self, sample: _Sample, reason: str) -> None:
        sample.reason = reason
        if self.ticket.feed is not None:
            self.ticket.feed.end(sample.index, reason)
        has_topk = self.ticket.request.topk_sample_logprobs > 0
        self.ticket.finished.append(
            SampledSequence(
                request_id=self.ticket.request_id or 0,
                sample_index=sample.index,
                tokens=[one.token for one in sample.tokens],
                logprobs=np.asarray([one.logprob for one in sample.tokens], dtype=np.float32),
                versions=[one.version for one in sample.tokens],
                finish_reason=reason,
                prompt=self._prompt,
                topk=[one.topk for one in sample.tokens] if has_topk else None,
                num_cached_prompt_tokens=self._num_cached,
            )
        )


def _seed_of(seed: int, index: int) -> int:
    """Return the seed of one completion, which its index and the seed of the request make."""
    digest = hashlib.sha256(f"{seed}/{index}".encode()).digest()
    return int.from_bytes(digest[:_SEED_BYTES], "big")


def _scores(
    request: SampleRequest,
    logprobs: list[float | None],
    likeliest: list[LikeliestTokens | None],
) -> PromptLogprobs:
    """Return the scores that a request asks for, out of those of the whole prompt."""
    last_n = request.prompt_logprobs_last_n
    num_left_out = 0 if last_n is None else len(logprobs) - last_n
    k = request.topk_prompt_logprobs
    return PromptLogprobs(
        [*([None] * num_left_out), *logprobs[num_left_out:]] if request.prompt_logprobs else [],
        [
            None if row is None or position < num_left_out else row[:k]
            for position, row in enumerate(likeliest)
        ]
        if k
        else [],
    )


def numbers() -> Iterator[int]:
    """Return names for completions, none of them twice."""
    return itertools.count(1)
