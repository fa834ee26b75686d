"""What a request wants to know of its prompt, taken from the logits of the prompt's positions.

The logits of position i are about token i + 1. Only positions from the first that is asked for have
logits at all: a request that scores the last tokens of a long prompt pays for their unembedding.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.base.types import IntArray
from tinsmith_engine.model.lm_head import log_probabilities
from tinsmith_engine.sampling.decode.token_selection import alternative_uniforms, draw
from tinsmith_engine.sampling.request.sample_request import (
    PromptAlternatives,
    PromptLogprobs,
    SampleRequest,
)


def wants_scores(request: SampleRequest) -> bool:
    """Return whether a request asks for anything about its prompt."""
    return (
        request.prompt_logprobs
        or request.topk_prompt_logprobs > 0
        or request.num_prompt_alternatives > 0
        or request.target_prompt_tokens is not None
    )


def first_scored_position(request: SampleRequest) -> int:
    """Return the first position whose logits are asked for; T - 1 if there is none."""
    positions = [len(request.prompt_tokens) - 1, _first_logprob(request)]
    if request.num_prompt_alternatives > 0:
        positions.append(0)
    if request.target_prompt_tokens is not None:
        positions += np.flatnonzero((request.target_prompt_tokens >= 0).any(axis=1))[:1].tolist()
    return min(positions)


def _first_logprob(request: SampleRequest) -> int:
    """Return the first position whose next token is scored; T - 1 if there is none."""
    num_positions = len(request.prompt_tokens) - 1
    if not (request.prompt_logprobs or request.topk_prompt_logprobs > 0):
        return num_positions
    if request.prompt_logprobs_last_n is None:
        return 0
    return num_positions - request.prompt_logprobs_last_n


class PromptScores:
    """The scores of a prompt, while the logits of its positions come in, in any order."""

    def __init__(self, request: SampleRequest) -> None:
        self._request = request
        num_tokens = len(request.prompt_tokens)
        self._next_tokens = torch.tensor(request.prompt_tokens[1:], dtype=torch.int64)
        self._first_logprob = _first_logprob(request)
        self._logprobs: list[float | None] = [None] * num_tokens
        self._topk: list[list[tuple[int, float]] | None] = [None] * num_tokens
        targets: IntArray | None = request.target_prompt_tokens
        self._targets = None if targets is None else np.zeros(targets.shape, dtype=np.float32)
        shape = (num_tokens - 1, request.num_prompt_alternatives)
        self._drawn = np.zeros(shape, dtype=np.int64)
        self._drawn_logprobs = np.zeros(shape, dtype=np.float32)

    def add(self, first: int, logits: Tensor) -> None:
        """Take what is asked for from the logits [rows, V] of neighbouring positions."""
        if not len(logits):
            return
        log_softmax = log_probabilities(logits)
        rows = slice(first, first + len(logits))
        self._add_logprobs(rows, log_softmax)
        self._add_targets(rows, log_softmax)
        self._add_alternatives(rows, logits, log_softmax)

    def _add_logprobs(self, rows: slice, log_softmax: Tensor) -> None:
        request = self._request
        start = max(rows.start, self._first_logprob)
        if start >= rows.stop:
            return
        wanted = log_softmax[start - rows.start :]
        if request.prompt_logprobs:
            tokens = self._next_tokens[start : rows.stop, None].to(wanted.device)
            self._logprobs[start + 1 : rows.stop + 1] = wanted.gather(1, tokens)[:, 0].tolist()
        if request.topk_prompt_logprobs > 0:
            values, ids = wanted.topk(request.topk_prompt_logprobs, dim=1)
            self._topk[start + 1 : rows.stop + 1] = [
                list(zip(*pair, strict=True))
                for pair in zip(ids.tolist(), values.tolist(), strict=True)
            ]

    def _add_targets(self, rows: slice, log_softmax: Tensor) -> None:
        tokens, found = self._request.target_prompt_tokens, self._targets
        if tokens is None or found is None:
            return
        wanted = torch.tensor(tokens[rows], device=log_softmax.device)
        scored = log_softmax.gather(1, wanted.clamp(min=0)).masked_fill(wanted < 0, 0.0)
        found[rows] = scored.cpu().numpy()

    def _add_alternatives(self, rows: slice, logits: Tensor, log_softmax: Tensor) -> None:
        request, count = self._request, self._request.num_prompt_alternatives
        if count == 0:
            return
        uniforms = alternative_uniforms(request.seed, range(rows.start, rows.stop), count)
        drawn = draw(logits, request.temperature, uniforms)
        self._drawn[rows] = drawn.cpu().numpy()
        self._drawn_logprobs[rows] = log_softmax.gather(1, drawn).cpu().numpy()

    def found(self) -> PromptLogprobs:
        """Return all scores."""
        request = self._request
        alternatives = PromptAlternatives(self._drawn, self._drawn_logprobs)
        return PromptLogprobs(
            logprobs=self._logprobs if request.prompt_logprobs else [],
            topk=self._topk if request.topk_prompt_logprobs > 0 else [],
            targets=self._targets,
            alternatives=alternatives if request.num_prompt_alternatives > 0 else None,
        )
