"""Target log-probabilities and their gradient without a [N, V] tensor.

Only rows that have a loss get logits; in a forward pass, all rows of sequences. Logits exist for
one chunk of rows at a time. The derivative of most losses with respect to a token's
log-probability needs that log-probability alone. So forward and backward of a chunk run back to
back while its logits are in cache. A loss of whole sequences scores all chunks first, and
computes their
logits again for the backward.

Chunks mix the rows of many runs; each row of a chunk is computed as if it were alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tinsmith_engine.lora.lora import LoraTarget
from tinsmith_engine.losses.losses import TokenLoss
from tinsmith_engine.model.linear import AdaptedRows, LinearTarget, Saved
from tinsmith_engine.products.ops import exponentials_, row_sums
from tinsmith_engine.products.split_products import ROW_TILE, padded_rows

# Memory of the logits of a chunk, at most 160 MB in float32. Products of fewer rows are slower.
_CHUNK_NUMBERS = 40 << 20
_MIN_CHUNK_ROWS, _MAX_CHUNK_SLOTS = 32, 256


class RowLosses(Protocol):
    """The losses of the rows of a head group."""

    is_of_sequence: bool

    def of_rows(self, logprobs: Tensor, rows: slice) -> TokenLoss:
        """Return the losses of a slice of the rows, for losses of tokens; padded to a chunk."""

    def of_all(self, logprobs: Tensor) -> TokenLoss:
        """Return the losses of all rows, for losses of sequences."""


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """Rows of a pass that go through the head together: M of them with K targets each."""

    rows: Tensor
    """Which packed rows, int64 [M]."""
    targets: Tensor
    """Target token ids, int64 [M, K]."""
    losses: RowLosses
    lora: LoraTarget | None = None
    """The adapter of the unembedding, of the one run that the rows then belong to."""


class HeadScores(NamedTuple):
    """What the head found for the rows of a group, float32 [M, K] each."""

    logprobs: Tensor
    loss: Tensor


def chunk_rows(vocab_size: int) -> int:
    """Return how many rows have logits at a time, at most: a function of the model alone."""
    rows = max(_MIN_CHUNK_ROWS, min(_MAX_CHUNK_SLOTS, _CHUNK_NUMBERS // vocab_size))
    return rows - rows % ROW_TILE


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the log-probability of every token for logits [c, V], as `run_head` computes it."""
    shifted = logits.float() - logits.amax(dim=1, keepdim=True)
    return shifted - row_sums(exponentials_(shifted.clone())).log()


def run_head(
    linear: LinearTarget, hidden: Tensor, groups: Sequence[HeadGroup], *, needs_gradient: bool
) -> tuple[list[HeadScores], Tensor | None]:
    """Score the targets of some rows and, if asked, go back through the unembedding.

    Args:
        linear: The unembedding, [V, H].
        hidden: Hidden states after the final norm, [N, H].
        groups: Which rows are scored, and how.
        needs_gradient: Whether to return the gradient of `hidden`, and to add the parameter
            gradients to the runs' rows.

    Returns:
        The scores by group, and the gradient [N, H] or None.
    """
    dhidden = torch.zeros_like(hidden) if needs_gradient else None
    scores = [_run_group(linear, hidden, group, dhidden) for group in groups]
    return scores, dhidden


def _run_group(
    linear: LinearTarget, hidden: Tensor, group: HeadGroup, dhidden: Tensor | None
) -> HeadScores:
    if isinstance(group.losses, NoLosses):
        return _run_chunks(linear, hidden, group, group.losses, None)
    if not group.losses.is_of_sequence:
        return _run_chunks(linear, hidden, group, group.losses, dhidden)
    logprobs = _run_chunks(linear, hidden, group, NoLosses(), None).logprobs
    losses = group.losses.of_all(logprobs)
    if dhidden is not None:
        _run_chunks(linear, hidden, group, KnownLosses(losses), dhidden)
    return HeadScores(logprobs, losses.loss_NK)


def _run_chunks(
    linear: LinearTarget,
    hidden: Tensor,
    group: HeadGroup,
    losses: RowLosses,
    dhidden: Tensor | None,
) -> HeadScores:
    num_rows = len(group.rows)
    logprobs = hidden.new_empty(group.targets.shape, dtype=torch.float32)
    loss = torch.empty_like(logprobs)
    start = 0
    for size in _chunks(num_rows, linear.split.row_tile, chunk_rows(linear.weight.shape[0])):
        rows = slice(start, min(start + size, num_rows))
        start += size
        chunk = _Chunk.of(linear, hidden, group, rows, size)
        logprobs[rows] = chunk.logprobs[: rows.stop - rows.start]
        found = losses.of_rows(chunk.logprobs, rows)
        loss[rows] = found.loss_NK[: rows.stop - rows.start]
        if dhidden is not None:
            dx = chunk.backward(found.dlogprobs_NK)
            dhidden.index_copy_(0, group.rows[rows], dx[: rows.stop - rows.start])
        # Or its logits would stay until those of the next one are made.
        del chunk
    return HeadScores(logprobs, loss)


def _chunks(num_rows: int, tile: int, limit: int) -> list[int]:
    """Return the rows of each chunk, of nearly one size, padding of the last one included."""
    if not num_rows:
        return []
    size = padded_rows(-(-num_rows // -(-num_rows // limit)), tile)
    full, left = divmod(padded_rows(num_rows, tile), size)
    return [size] * full + ([left] if left else [])


class _Chunk:
    """Rows that have logits at the moment."""

    def __init__(
        self, linear: LinearTarget, hidden: Tensor, targets: Tensor, logits: Tensor, saved: Saved
    ) -> None:
        self._target, self._hidden, self._targets, self._saved = linear, hidden, targets, saved
        highest = logits.amax(dim=1, keepdim=True)
        shifted = logits.float().sub_(highest)
        chosen = shifted.gather(1, targets)
        self._exponentials = exponentials_(shifted)
        self._sums = row_sums(self._exponentials)
        self.logprobs = chosen - self._sums.log()

    @classmethod
    def of(
        cls, linear: LinearTarget, hidden: Tensor, group: HeadGroup, rows: slice, size: int
    ) -> _Chunk:
        """Compute the logits of some rows of a group, filled up to `size` rows."""
        indices, targets = group.rows[rows], group.targets[rows]
        missing = size - len(indices)
        if missing:
            # The group's own first row: what fills a chunk of an adapted run must be its own.
            indices = torch.cat([indices, group.rows[:1].expand(missing)])
            targets = torch.cat([targets, group.targets[:1].expand(missing, -1)])
        if group.lora is not None:
            linear = linear.adapt((AdaptedRows(slice(0, size), group.lora),))
        chosen = hidden.index_select(0, indices)
        logits, saved = linear.forward(chosen)
        return cls(linear, chosen, targets, logits, saved)

    def backward(self, dlogprobs: Tensor) -> Tensor:
        """Return the gradient of the hidden states for that of the log-probabilities [c, K]."""
        # d logprob / d logits = onehot - softmax, built in place of the exponentials.
        totals = dlogprobs.sum(dim=1, keepdim=True)
        dlogits = self._exponentials.mul_(-totals / self._sums)
        rows = torch.arange(len(dlogits), device=dlogits.device)[:, None].expand_as(self._targets)
        dlogits.index_put_((rows, self._targets), dlogprobs, accumulate=True)
        dx = self._target.backward(dlogits.to(self._hidden.dtype), self._hidden, self._saved)
        if dx is None:
            raise AssertionError("a unit that was asked for the input gradient returned none")
        return dx


class NoLosses:
    """No loss: rows are scored only."""

    is_of_sequence = False

    def of_rows(self, logprobs: Tensor, rows: slice) -> TokenLoss:
        """Return zeros."""
        del rows
        zeros = torch.zeros_like(logprobs)
        return TokenLoss(zeros, zeros)

    def of_all(self, logprobs: Tensor) -> TokenLoss:
        """Return zeros."""
        return self.of_rows(logprobs, slice(None))


class KnownLosses:
    """Losses that were computed before."""

    is_of_sequence = False

    def __init__(self, losses: TokenLoss) -> None:
        self._losses = losses

    def of_rows(self, logprobs: Tensor, rows: slice) -> TokenLoss:
        """Return the losses of a slice of the rows, padded to a chunk."""
        return TokenLoss(*(_filled(part[rows], len(logprobs)) for part in self._losses))

    def of_all(self, logprobs: Tensor) -> TokenLoss:
        """Return the losses of all rows."""
        del logprobs
        return self._losses


def _filled(values: Tensor, num_rows: int) -> Tensor:
    """Return values [n, K] with zeros behind, as many rows as a chunk has."""
    missing = num_rows - len(values)
    return torch.nn.functional.pad(values, (0, 0, 0, missing)) if missing else values
