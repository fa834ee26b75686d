"""The losses of the rows of a pass, whose operations may ask for different ones.

Each loss is computed for a whole chunk of rows and chosen by row. Elementwise kernels then see
the same shape whatever runs are in the chunk. What a row does not have (another loss's inputs,
filling) is
zero, and has no loss and no gradient. A loss of whole sequences is computed by sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.base.loss_specs import LOSS_SPECS
from tinsmith_engine.base.types import FloatArray
from tinsmith_engine.losses.losses import LOSSES, TokenLoss, gspo


@dataclass(frozen=True, slots=True)
class LossRows:
    """The rows of one sequence that have a loss, n of them."""

    loss: str
    inputs: Mapping[str, FloatArray]
    """Inputs and settings of the loss by row, float32 [n], or [n, K] for several targets."""
    num_rows: int


class MixedLosses:
    """Losses of tokens, by row."""

    is_of_sequence = False
    of_sequences: Sequence[float] = ()

    def __init__(self, parts: Sequence[LossRows], device: torch.device) -> None:
        self._losses = {
            loss: (_input_columns(loss, parts, device), _is_mine(loss, parts, device))
            for loss in sorted({part.loss for part in parts})
        }

    def of_rows(self, logprobs: Tensor, rows: slice) -> TokenLoss:
        """Return the losses of a slice of the rows; zero for what fills the chunk."""
        found: TokenLoss | None = None
        for loss, (inputs, is_mine) in self._losses.items():
            chunk = {name: _rows(values, rows, len(logprobs)) for name, values in inputs.items()}
            ours = LOSSES[loss](logprobs, chunk)
            wanted = _rows(is_mine, rows, len(logprobs))
            others = found or TokenLoss(*(torch.zeros_like(logprobs) for _ in ours))
            found = TokenLoss(
                *(torch.where(wanted, mine, rest) for mine, rest in zip(ours, others, strict=True))
            )
        if found is None:
            raise ValueError("a head group has at least one loss")
        return found

    def of_all(self, logprobs: Tensor) -> TokenLoss:
        """Return the losses of all rows."""
        return self.of_rows(logprobs, slice(0, len(logprobs)))


class SequenceLosses:
    """Losses of whole sequences: GSPO's."""

    is_of_sequence = True

    def __init__(self, parts: Sequence[LossRows]) -> None:
        self._parts = parts
        self.of_sequences: list[float] = []
        """The ratio of each sequence, once its loss is known."""

    def of_all(self, logprobs: Tensor) -> TokenLoss:
        """Return the losses of all rows."""
        values, start = logprobs[:, 0].cpu().numpy(), 0
        losses, dlogprobs = [], []
        for part in self._parts:
            loss, dlogprob, ratio = gspo(values[start : start + part.num_rows], part.inputs)
            losses.append(loss)
            dlogprobs.append(dlogprob)
            self.of_sequences.append(ratio)
            start += part.num_rows
        return TokenLoss(*(_column(found, logprobs.device) for found in (losses, dlogprobs)))

    def of_rows(self, logprobs: Tensor, rows: slice) -> TokenLoss:
        """Never called: a sequence may lie in several chunks."""
        del logprobs, rows
        raise TypeError("the loss of a sequence is not known by chunk")


def losses_of(
    parts: Sequence[LossRows], device: torch.device, *, is_of_sequence: bool
) -> MixedLosses | SequenceLosses:
    """Return the losses of the rows of a group, which are all of tokens or all of GSPO."""
    return SequenceLosses(parts) if is_of_sequence else MixedLosses(parts, device)


def _column(parts: Sequence[FloatArray], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts))[:, None].to(device)


def _input_columns(loss: str, parts: Sequence[LossRows], device: torch.device) -> dict[str, Tensor]:
    """Return each input of a loss for all rows, float32 [M, 1] or [M, K]; zero for other rows."""
    spec = LOSS_SPECS[loss]
    columns = {}
    for name in (*spec.inputs, *spec.config):
        # Of the rows of a group all have as many targets, but [n] and [n, 1] are both one.
        arrays = [
            part.inputs[name].reshape(part.num_rows, -1) if part.loss == loss else None
            for part in parts
        ]
        width = max(array.shape[1] for array in arrays if array is not None)
        stacked = np.concatenate(
            [
                np.zeros((part.num_rows, width), np.float32) if array is None else array
                for part, array in zip(parts, arrays, strict=True)
            ]
        )
        columns[name] = torch.from_numpy(stacked.astype(np.float32, copy=False)).to(device)
    return columns


def _is_mine(loss: str, parts: Sequence[LossRows], device: torch.device) -> Tensor:
    mine = np.repeat([part.loss == loss for part in parts], [part.num_rows for part in parts])
    return torch.from_numpy(mine)[:, None].to(device)


def _rows(values: Tensor, rows: slice, num_rows: int) -> Tensor:
    """Return a slice of rows with zeros behind, as many rows as a chunk has."""
    chosen = values[rows]
    missing = num_rows - len(chosen)
    if not missing:
        return chosen
    return torch.cat([chosen, chosen.new_zeros(missing, *chosen.shape[1:])])
