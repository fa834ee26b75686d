"""From logits to tokens: greedy, temperature, min-p, top-k, top-p, by numbers of the sample alone.

Each token of each sample has one uniform number, a hash of (seed, sample, token index), and is
found by inverting the cumulative distribution. There is no generator whose state could depend on
what else was sampled, and any token can be drawn again on its own. Alternatives of a prompt have
numbers of their own, from a stream that no sample has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
# Stands where a sample's index would; there is no sample of this index.
_ALTERNATIVES = _MASK


@dataclass(frozen=True, slots=True)
class PickRule:
    """How one row's next token is chosen."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float
    """In [0, 1)."""
    min_p: float = 0.0


def uniform(seed: int, sample_index: int, token_index: int) -> float:
    """Return the number in [0, 1) that decides one token (splitmix64, Steele et al. 2014)."""
    return (_hash(seed, sample_index, token_index) >> 11) * 2.0**-53


def alternative_uniforms(seed: int, positions: range, count: int) -> NDArray[np.float64]:
    """Return the numbers in [0, 1) that decide `count` alternatives at prompt positions, [N, k]."""
    states = np.full((len(positions), count), _hash(seed, _ALTERNATIVES), dtype=np.uint64)
    for words in (np.asarray(positions)[:, None], np.arange(count)[None]):
        # Arrays of this dtype wrap around, as the hash wants.
        states = (states ^ words.astype(np.uint64)) + np.uint64(_STEP)
        states = (states ^ (states >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        states = (states ^ (states >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        states = states ^ (states >> np.uint64(31))
    return (states >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _hash(*words: int) -> int:
    state = 0
    for word in words:
        state = _mix((state ^ (word & _MASK)) + _STEP & _MASK)
    return state


def _mix(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)


def pick(logits_RV: Tensor, rules: Sequence[PickRule]) -> Tensor:
    """Return the chosen token of each row, int64 [R]; min-p, top-k and top-p in this order."""
    vocab_size = logits_RV.shape[1]
    greedy, plain, cut = [], [], []
    for row, rule in enumerate(rules):
        if rule.temperature == 0.0:
            greedy.append(row)
        elif rule.top_p < 1.0 or rule.min_p > 0.0 or 0 < rule.top_k < vocab_size:
            cut.append(row)
        else:
            plain.append(row)
    chosen = torch.empty(len(rules), dtype=torch.int64, device=logits_RV.device)
    if greedy:
        chosen[greedy] = logits_RV[greedy].argmax(dim=1)
    if plain:
        plain_rules = [rules[row] for row in plain]
        chosen[plain] = _invert(_weights(logits_RV[plain], _heats(plain_rules)), plain_rules)
    if cut:
        chosen[cut] = _pick_cut(logits_RV[cut], [rules[row] for row in cut])
    return chosen


def draw(logits_RV: Tensor, temperature: float, uniforms_RK: NDArray[np.float64]) -> Tensor:
    """Return K tokens of each row, with replacement, int64 [R, K]; the likeliest at 0."""
    if temperature == 0.0:
        return logits_RV.argmax(dim=1, keepdim=True).expand(-1, uniforms_RK.shape[1])
    weights_RV = _weights(logits_RV, [temperature] * len(logits_RV))
    return _invert_all(weights_RV, torch.from_numpy(uniforms_RK).to(logits_RV.device))


def _heats(rules: Sequence[PickRule]) -> list[float]:
    return [rule.temperature for rule in rules]


def _weights(logits_RV: Tensor, temperatures: Sequence[float]) -> Tensor:
    """Return each token's probability up to a factor of its row, float32 [R, V]."""
    # Relative to the maximum first: dividing raw logits by a tiny temperature would overflow.
    relative = logits_RV - logits_RV.amax(dim=1, keepdim=True)
    if any(temperature != 1.0 for temperature in temperatures):
        relative /= _column(temperatures, relative)
    return relative.exp_()


def _pick_cut(logits_RV: Tensor, rules: Sequence[PickRule]) -> Tensor:
    ordered, tokens = _weights(logits_RV, _heats(rules)).sort(dim=1, descending=True, stable=True)
    vocab_size = logits_RV.shape[1]
    # The likeliest token has the weight 1.
    ordered *= ordered >= _column([rule.min_p for rule in rules], ordered)
    limits = [rule.top_k if rule.top_k > 0 else vocab_size for rule in rules]
    ranks = torch.arange(vocab_size, device=logits_RV.device)
    ordered *= ranks < torch.tensor(limits, device=logits_RV.device)[:, None]
    cumulative = ordered.cumsum(dim=1, dtype=torch.float64)
    reach = cumulative[:, -1:] * _column([rule.top_p for rule in rules], cumulative)
    # A token stays if those before it do not reach p yet; the first one always does.
    ordered *= cumulative - ordered < reach
    return tokens.gather(1, _invert(ordered, rules)[:, None])[:, 0]


def _invert(weights_RV: Tensor, rules: Sequence[PickRule]) -> Tensor:
    uniforms = torch.tensor([[rule.uniform] for rule in rules], dtype=torch.float64)
    return _invert_all(weights_RV, uniforms.to(weights_RV.device))[:, 0]


def _invert_all(weights_RV: Tensor, uniforms_RK: Tensor) -> Tensor:
    # float64: the sum over a large vocabulary would swallow rare tokens in float32.
    cumulative = weights_RV.cumsum(dim=1, dtype=torch.float64)
    drawn = cumulative[:, -1:] * uniforms_RK
    # The first token whose cumulative weight exceeds the number: its own weight is not zero.
    found = torch.searchsorted(cumulative, drawn, right=True)
    return found.clamp_(max=weights_RV.shape[1] - 1)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
