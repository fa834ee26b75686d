"""One pass over a batch: split, pack, score, and results in the caller's order.

What happens here depends on the batch and the weights alone. The loss is summed in float64 over the
whole batch in its own order, so it does not depend on the split either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.head import TokenLossFunction
from tinsmith_engine.loss_specs import LOSS_SPECS
from tinsmith_engine.losses import LOSSES, TokenLoss, full_config, metrics
from tinsmith_engine.models import Model
from tinsmith_engine.packing import MicroBatch, pack, split_batch
from tinsmith_engine.values import Datum, FloatArray, ForwardResult
from tinsmith_runtime.errors import OutOfMemoryError


@dataclass(frozen=True, slots=True)
class Scorer:
    """Runs batches through a model."""

    model: Model[Any]
    device: torch.device
    micro_batch_tokens: int

    def score(
        self,
        bound: Any,
        batch: Sequence[Datum],
        loss: str,
        loss_config: Mapping[str, float],
        *,
        needs_gradient: bool,
    ) -> ForwardResult:
        """Score a valid batch; with `needs_gradient`, add to the bound run's gradient row.

        Raises:
            OutOfMemoryError: A micro-batch does not fit into memory. Micro-batches before it are
                in the gradient row already.
        """
        config = full_config(loss, loss_config)
        names = LOSS_SPECS[loss].inputs
        logprobs: dict[int, FloatArray] = {}
        losses: dict[int, FloatArray] = {}
        lengths = [datum.tokens_T.size for datum in batch]
        for datums in split_batch(lengths, self.micro_batch_tokens):
            micro_batch = pack(batch, datums, names, self.device)
            token_loss = _token_loss(loss, micro_batch, config)
            try:
                scores = self.model.score(
                    bound, micro_batch, token_loss, needs_gradient=needs_gradient
                )
            except RuntimeError as error:
                if not _is_out_of_memory(error):
                    raise
                raise _does_not_fit(micro_batch) from error
            boundaries = np.cumsum(micro_batch.lengths)[:-1]
            for found, numbers_N in ((logprobs, scores.logprobs_N), (losses, scores.loss_N)):
                parts = np.split(numbers_N.cpu().numpy(), boundaries)
                found.update(zip(micro_batch.datums, parts, strict=True))
        in_order = range(len(batch))
        return ForwardResult(
            logprobs=[logprobs[index] for index in in_order],
            metrics=metrics(
                loss,
                config,
                np.concatenate([losses[index] for index in in_order]),
                np.concatenate([logprobs[index] for index in in_order]),
                {name: np.concatenate([d.loss_inputs[name] for d in batch]) for name in names},
            ),
        )


def _token_loss(
    loss: str, micro_batch: MicroBatch, config: Mapping[str, float]
) -> TokenLossFunction:
    function, inputs = LOSSES[loss], micro_batch.loss_inputs

    def token_loss(logprobs_N: Tensor, rows: slice) -> TokenLoss:
        return function(logprobs_N, {name: x[rows] for name, x in inputs.items()}, config)

    return token_loss


def _is_out_of_memory(error: RuntimeError) -> bool:
    # The CPU allocator raises a plain RuntimeError.
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _does_not_fit(micro_batch: MicroBatch) -> OutOfMemoryError:
    num_tokens = sum(micro_batch.lengths)
    return OutOfMemoryError(
        f"{num_tokens} tokens in one pass do not fit into the memory of the device; send shorter "
        "sequences",
        num_tokens=num_tokens,
    )
