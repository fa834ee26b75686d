"""How a batch becomes padding-free micro-batches.

The split depends on the batch alone, never on load or on other runs, because it changes the order
of float additions: the same operation then gives the same bits whatever else the process does.
Sequences are sorted by length, which lets attention run in a few buckets of equal padded length,
and filled greedily up to a budget of tokens. Results are handed back in the caller's order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.values import Datum

# Attention pads a sequence to a multiple of this: finer costs kernel launches, coarser arithmetic.
_SHORT_STEP, _LONG_STEP, _SHORT_TOKENS = 16, 64, 128
PADDING_RULE = f"{_SHORT_STEP}<={_SHORT_TOKENS}<{_LONG_STEP}"
"""The rule, for the fingerprint."""


def padded_length(num_tokens: int) -> int:
    """Return the length that attention pads a sequence to: a function of the sequence alone."""
    step = _SHORT_STEP if num_tokens <= _SHORT_TOKENS else _LONG_STEP
    return -(-num_tokens // step) * step


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring sequences of a micro-batch that attention handles as one padded tensor."""

    start: int
    stop: int
    """Rows of the packed tensors, half-open."""
    num_sequences: int
    length: int
    """Tokens of each padded sequence."""
    places: Tensor | None
    """Where each packed row lies in the flattened padded tensor, int64; None if nothing is
    padded."""


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """N tokens of several whole sequences, one after the other."""

    datums: tuple[int, ...]
    """Which datums of the batch these are, in packed order."""
    lengths: tuple[int, ...]
    tokens_N: Tensor
    targets_N: Tensor
    positions_N: Tensor
    loss_inputs: dict[str, Tensor]
    """Float32 [N] each."""
    buckets: tuple[Bucket, ...]


def split_batch(lengths: Sequence[int], micro_batch_tokens: int) -> list[list[int]]:
    """Return the indices of the datums of each micro-batch.

    A sequence longer than the budget gets a micro-batch of its own: sequences are never cut.
    """
    parts: list[list[int]] = []
    num_tokens = 0
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if not parts or num_tokens + lengths[index] > micro_batch_tokens:
            parts.append([])
            num_tokens = 0
        parts[-1].append(index)
        num_tokens += lengths[index]
    return parts


def pack(
    batch: Sequence[Datum],
    datums: Sequence[int],
    loss_input_names: Sequence[str],
    device: torch.device,
) -> MicroBatch:
    """Lay out the chosen datums, sorted by length, as one micro-batch on the device."""
    chosen = [batch[index] for index in datums]
    lengths = tuple(datum.tokens_T.size for datum in chosen)

    def ids(arrays: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(np.int64, copy=False)).to(device)

    def numbers(name: str) -> Tensor:
        array = np.concatenate([datum.loss_inputs[name] for datum in chosen])
        return torch.from_numpy(array.astype(np.float32, copy=False)).to(device)

    return MicroBatch(
        datums=tuple(datums),
        lengths=lengths,
        tokens_N=ids([datum.tokens_T for datum in chosen]),
        targets_N=ids([datum.targets_T for datum in chosen]),
        positions_N=ids([np.arange(length) for length in lengths]),
        loss_inputs={name: numbers(name) for name in loss_input_names},
        buckets=attention_buckets(lengths, device),
    )


def attention_buckets(lengths: Sequence[int], device: torch.device) -> tuple[Bucket, ...]:
    """Group neighbouring sequences of equal padded length."""
    buckets: list[Bucket] = []
    start = first = 0
    while first < len(lengths):
        length = padded_length(lengths[first])
        last = first
        while last < len(lengths) and padded_length(lengths[last]) == length:
            last += 1
        members = lengths[first:last]
        stop = start + sum(members)
        buckets.append(_bucket(start, stop, members, length, device))
        start, first = stop, last
    return tuple(buckets)


def _bucket(
    start: int, stop: int, members: Sequence[int], length: int, device: torch.device
) -> Bucket:
    if stop - start == length * len(members):
        return Bucket(start, stop, len(members), length, None)
    places = np.concatenate([np.arange(n) + i * length for i, n in enumerate(members)])
    return Bucket(start, stop, len(members), length, torch.from_numpy(places).to(device))
