"""Penalties and biases of a sample: what is done to logits before a token is picked from them.

A row has the tokens that something is done to, and what: a factor for tokens that were there
before, and an addend. Both are kept up with each token instead of being counted again, and rows
that want nothing are not touched. Each value is computed by itself, so that a row has the same
bits among others as alone. Reported log-probabilities are those of the logits before.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tinsmith_runtime.text.penalties import Shaping


class RowShaping:
    """What is done to the logits of one sample, as far as it has grown."""

    def __init__(self, shaping: Shaping, prompt: Sequence[int]) -> None:
        self._shaping = shaping
        self._places: dict[int, int] = {}
        self._sampled: set[int] = set()
        self._tokens, self._factors, self._addends = array("q"), array("f"), array("f")
        for token, bias in shaping.logit_bias.items():
            self._addends[self._place(token)] = bias
        if shaping.repetition_penalty != 1.0:
            for token in prompt:
                self._factors[self._place(token)] = shaping.repetition_penalty

    @property
    def num_tokens(self) -> int:
        """Tokens that something is done to."""
        return len(self._tokens)

    def note(self, token: int) -> None:
        """Take the next token of the sample in."""
        place = self._place(token)
        self._factors[place] = self._shaping.repetition_penalty
        if token not in self._sampled:
            self._sampled.add(token)
            self._addends[place] -= self._shaping.presence_penalty
        self._addends[place] -= self._shaping.frequency_penalty

    def columns(self) -> tuple[array[int], array[float], array[float]]:
        """Return tokens, and the factor and the addend of each."""
        return self._tokens, self._factors, self._addends

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._tokens))
        if place == len(self._tokens):
            self._tokens.append(token)
            self._factors.append(1.0)
            self._addends.append(0.0)
        return place


def shape_logits(logits_RV: Tensor, rows: Sequence[RowShaping | None]) -> Tensor:
    """Return logits to pick from; the same tensor if there is nothing to do.

    Args:
        logits_RV: Of the model, float32 [R, V]; they stay as they are.
        rows: What is done to each row.
    """
    wanted = [(row, one) for row, one in enumerate(rows) if one is not None and one.num_tokens]
    if not wanted:
        return logits_RV
    columns = [one.columns() for _, one in wanted]
    device = logits_RV.device
    counts = [one.num_tokens for _, one in wanted]
    at_rows = torch.from_numpy(np.repeat([row for row, _ in wanted], counts)).to(device)
    tokens = _joined([column[0] for column in columns], np.int64).to(device)
    factors = _joined([column[1] for column in columns], np.float32).to(device)
    addends = _joined([column[2] for column in columns], np.float32).to(device)
    values = logits_RV[at_rows, tokens]
    values = torch.where(values > 0, values / factors, values * factors) + addends
    return logits_RV.index_put((at_rows, tokens), values)


def _joined(parts: Sequence[array[int] | array[float]], dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=dtype) for part in parts]))
