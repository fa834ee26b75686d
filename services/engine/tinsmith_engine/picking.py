"""From logits to tokens: greedy, temperature, top-k, top-p, by numbers that depend on nobody.

Each token of each sample has one uniform number, a hash of (seed, sample, token index), and is
found by inverting the cumulative distribution. There is no generator whose state could depend on
what else was sampled, and any token can be drawn again on its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class PickRule:
    """How one row's next token is chosen."""

    temperature: float
    top_k: int
    top_p: float
    uniform: float
    """In [0, 1)."""


def uniform(seed: int, sample_index: int, token_index: int) -> float:
    """Return the number in [0, 1) that decides one token (splitmix64, Steele et al. 2014)."""
    state = 0
    for word in (seed, sample_index, token_index):
        state = _mix((state ^ (word & _MASK)) + 0x9E3779B97F4A7C15 & _MASK)
    return (state >> 11) * 2.0**-53


def _mix(state: int) -> int:
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)


def pick(logits_RV: Tensor, rules: Sequence[PickRule]) -> Tensor:
    """Return the chosen token of each row, int64 [R]; top-k applies before top-p."""
    vocab_size = logits_RV.shape[1]
    greedy, plain, cut = [], [], []
    for row, rule in enumerate(rules):
        if rule.temperature == 0.0:
            greedy.append(row)
        elif rule.top_p < 1.0 or 0 < rule.top_k < vocab_size:
            cut.append(row)
        else:
            plain.append(row)
    chosen = torch.empty(len(rules), dtype=torch.int64, device=logits_RV.device)
    if greedy:
        chosen[greedy] = logits_RV[greedy].argmax(dim=1)
    if plain:
        probabilities = _probabilities(logits_RV[plain], [rules[row] for row in plain])
        chosen[plain] = _invert(probabilities, [rules[row] for row in plain])
    if cut:
        chosen[cut] = _pick_cut(logits_RV[cut], [rules[row] for row in cut])
    return chosen


def _probabilities(logits_RV: Tensor, rules: Sequence[PickRule]) -> Tensor:
    temperatures = torch.tensor(
        [[rule.temperature] for rule in rules], dtype=torch.float64, device=logits_RV.device
    )
    # Relative to the maximum first: dividing raw logits by a tiny temperature would overflow.
    relative = (logits_RV - logits_RV.amax(dim=1, keepdim=True)).double()
    return torch.softmax(relative / temperatures, dim=1)


def _pick_cut(logits_RV: Tensor, rules: Sequence[PickRule]) -> Tensor:
    ordered, tokens = _probabilities(logits_RV, rules).sort(dim=1, descending=True, stable=True)
    vocab_size = logits_RV.shape[1]
    limits = [rule.top_k if rule.top_k > 0 else vocab_size for rule in rules]
    ranks = torch.arange(vocab_size, device=logits_RV.device)
    ordered = ordered * (ranks < torch.tensor(limits, device=logits_RV.device)[:, None])
    ordered /= ordered.sum(dim=1, keepdim=True)
    top_p = torch.tensor(
        [[rule.top_p] for rule in rules], dtype=torch.float64, device=logits_RV.device
    )
    # A token stays if those before it do not reach p yet; the first one always does.
    ordered = ordered * (ordered.cumsum(dim=1) - ordered < top_p)
    return tokens.gather(1, _invert(ordered, rules)[:, None])[:, 0]


def _invert(weights_RV: Tensor, rules: Sequence[PickRule]) -> Tensor:
    cumulative = weights_RV.cumsum(dim=1)
    uniforms = torch.tensor(
        [[rule.uniform] for rule in rules], dtype=torch.float64, device=weights_RV.device
    )
    # The first token whose cumulative weight exceeds the number: its own weight is not zero.
    found = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return found[:, 0].clamp_(max=weights_RV.shape[1] - 1)
