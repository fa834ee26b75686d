"""Target log-probabilities and their gradient without a [N, V] tensor.

Logits exist for one chunk of rows at a time. Because the derivative of every loss with respect to a
token's log-probability needs that log-probability alone, forward and backward of a chunk run back
to back while its logits are in cache. Rows with a zero derivative (prompt tokens, clipped tokens)
take part in the forward only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tinsmith_engine.linear import LinearUnit
from tinsmith_engine.losses import TokenLoss

_CHUNK_NUMBERS = 1 << 20
_MIN_CHUNK_ROWS, _MAX_CHUNK_ROWS = 32, 256

TokenLossFunction = Callable[[Tensor, slice], TokenLoss]
"""Maps log-probabilities of the rows of a slice, float32, to their losses."""


class HeadResult(NamedTuple):
    """What the head found for N rows."""

    logprobs_N: Tensor
    loss_N: Tensor
    dhidden: Tensor | None
    """Gradient of the hidden states [N, H], in their dtype; None in a forward-only pass."""


def chunk_rows(vocab_size: int) -> int:
    """Return how many rows have logits at a time: a function of the model alone."""
    return max(_MIN_CHUNK_ROWS, min(_MAX_CHUNK_ROWS, _CHUNK_NUMBERS // vocab_size))


def run_head(
    unit: LinearUnit,
    hidden: Tensor,
    targets_N: Tensor,
    loss_function: TokenLossFunction,
    *,
    needs_gradient: bool,
) -> HeadResult:
    """Score the targets of N rows and, if asked, go back through the unembedding.

    Args:
        unit: The unembedding, [V, H].
        hidden: Hidden states after the final norm, [N, H].
        targets_N: Target token ids, int64 [N].
        loss_function: The loss of the operation.
        needs_gradient: Whether to fill `dhidden` and add the unit's parameter gradients.
    """
    num_rows = hidden.shape[0]
    step = chunk_rows(unit.weight.shape[0])
    logprobs, losses = [], []
    dhidden = torch.zeros_like(hidden) if needs_gradient else None
    for start in range(0, num_rows, step):
        rows = slice(start, min(start + step, num_rows))
        logits, projected = unit.forward(hidden[rows])
        log_softmax = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        targets = targets_N[rows, None]
        logprobs.append(log_softmax.gather(1, targets)[:, 0])
        loss = loss_function(logprobs[-1], rows)
        losses.append(loss.loss_N)
        if dhidden is not None:
            _backward_chunk(
                unit, hidden[rows], log_softmax, targets, loss.dlogprobs_N, projected, dhidden[rows]
            )
    return HeadResult(torch.cat(logprobs), torch.cat(losses), dhidden)


def _backward_chunk(
    unit: LinearUnit,
    hidden: Tensor,
    log_softmax: Tensor,
    targets: Tensor,
    dlogprobs: Tensor,
    projected: Tensor | None,
    dhidden: Tensor,
) -> None:
    active = dlogprobs.nonzero()[:, 0]
    if len(active) == 0:
        return
    is_partial = len(active) < len(dlogprobs)
    if is_partial:
        hidden, log_softmax, targets = hidden[active], log_softmax[active], targets[active]
        dlogprobs = dlogprobs[active]
        projected = None if projected is None else projected[active]
    # d logprob / d logits = onehot - softmax, built in place of the log-probabilities.
    dlogits = log_softmax.exp_().mul_(-dlogprobs[:, None])
    dlogits.scatter_add_(1, targets, dlogprobs[:, None])
    dx = unit.backward(dlogits.to(hidden.dtype), hidden, projected)
    if dx is None:
        raise AssertionError("a unit that was asked for the input gradient returned none")
    if is_partial:
        dhidden.index_copy_(0, active, dx)
    else:
        dhidden.copy_(dx)
