"""One operation's batch on its way through the passes: microbatches in, results out.

An execution knows the order of its microbatches and collects what passes find for its sequences.
For the case that the operation fails, it holds what restores its run: a copy of the gradient
that was pending before it. The loss is summed in float64 over the whole batch in its own order, so
it does not depend on the split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith_engine.arena.adam import grad_norm
from tinsmith_engine.base.loss_specs import LOSS_SPECS, LossSpec, full_config, token_settings
from tinsmith_engine.base.types import BatchRequest, BatchResult, Datum, FloatArray
from tinsmith_engine.losses.batch_losses import LossRows
from tinsmith_engine.losses.losses import metrics
from tinsmith_engine.packing.moe_routing import Routes
from tinsmith_engine.packing.packing import segment_rows, split_batch
from tinsmith_engine.runs.run_store import Run
from tinsmith_runtime.errors import NonFiniteLossError, TinsmithError

_FoundDatum = tuple[FloatArray, FloatArray, float | None]


@dataclass(slots=True)
class BatchExecution:
    """One batch request that is being computed.

    Attributes:
        request: What was asked for; valid.
        run: Whose weights are used; None for the base model.
        micro_batch_tokens: How the batch is split.
        starts_fresh: Whether this process computes a part of the gradient that does not continue
            what the run accumulated before (`distributed.microbatch_assignment`).
        outcome: What became of it, once it ended.
    """

    request: BatchRequest
    run: Run | None
    micro_batch_tokens: int
    starts_fresh: bool = False
    outcome: BatchResult | TinsmithError | None = None
    _microbatches: list[list[int]] = field(default_factory=list)
    _num_done: int = 0
    _logprobs: dict[int, FloatArray] = field(default_factory=dict)
    _losses: dict[int, FloatArray] = field(default_factory=dict)
    _of_sequences: dict[int, float] = field(default_factory=dict)
    _experts: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    _gradient_before: Tensor | None = None

    @property
    def spec(self) -> LossSpec:
        """The loss."""
        return LOSS_SPECS[self.request.loss]

    @property
    def accumulates(self) -> bool:
        """Whether the run's gradient row holds something that the next microbatch adds to."""
        if self.run is None:
            return False
        return self._num_done > 0 or (self.run.has_gradient and not self.starts_fresh)

    def begin(self) -> None:
        """Split the batch, and remember the gradient that a failure must leave behind."""
        lengths = [datum.tokens_T.size for datum in self.request.batch]
        self._microbatches = split_batch(lengths, self.micro_batch_tokens)
        self._num_done = 0
        self._experts = {}
        self._of_sequences = {}
        if self.run is not None and self.request.is_backward and self.run.has_gradient:
            self._gradient_before = self.run.slot.grad_P.clone()

    @property
    def is_begun(self) -> bool:
        """Whether `begin` was called."""
        return bool(self._microbatches)

    @property
    def microbatches(self) -> list[list[int]]:
        """The datums of each microbatch that is left."""
        return self._microbatches[self._num_done :]

    def rows_of(self, microbatch: Sequence[int]) -> int:
        """Return how many rows the segment of a microbatch takes."""
        return segment_rows([self.request.batch[index].tokens_T.size for index in microbatch])

    @property
    def rows_left(self) -> int:
        """How many rows the microbatches take that were not computed; about, before `begin`."""
        if not self.is_begun:
            return sum(datum.tokens_T.size for datum in self.request.batch)
        return sum(self.rows_of(microbatch) for microbatch in self.microbatches)

    def scored(self, index: int) -> NDArray[np.bool_]:
        """Return which tokens of a datum are scored with a loss, bool [T].

        A forward pass scores all so; in another, those without a loss are scored beside them.
        """
        datum = self.request.batch[index]
        if self.request.is_backward:
            return self.spec.is_active(datum)
        return np.ones(datum.tokens_T.size, dtype=bool)

    def loss_inputs(self, index: int, is_scored: NDArray[np.bool_]) -> dict[str, Any]:
        """Return the inputs and settings of the loss for the scored tokens of a datum."""
        datum = self.request.batch[index]
        config = full_config(self.request.loss, self.request.loss_config)
        found = {name: datum.loss_inputs[name] for name in self.spec.inputs}
        found |= token_settings(datum, config, datum.tokens_T.size)
        return {name: values[is_scored] for name, values in found.items()}

    def loss_rows(self, index: int, is_scored: NDArray[np.bool_]) -> LossRows:
        """Return what the loss of the scored tokens of a datum is computed from."""
        return LossRows(self.request.loss, self.loss_inputs(index, is_scored), int(is_scored.sum()))

    def take(
        self,
        index: int,
        is_scored: NDArray[np.bool_],
        logprobs: FloatArray,
        losses: FloatArray,
        of_sequence: float | None,
    ) -> None:
        """Keep what a pass found for the scored tokens of a datum, [n, K] each."""
        datum = self.request.batch[index]
        whole = np.zeros(datum.targets_T.shape, dtype=np.float32)
        whole[is_scored] = logprobs if whole.ndim == 2 else logprobs[:, 0]
        self._logprobs[index] = whole
        # A forward pass scores tokens that have no loss, such as those of a prompt.
        is_active = self.spec.is_active(datum)[is_scored]
        summed = losses.sum(axis=1) if losses.shape[1] > 1 else losses[:, 0]
        self._losses[index] = np.where(is_active, summed, np.float32(0.0))
        if of_sequence is not None and is_active.any():
            self._of_sequences[index] = of_sequence

    def take_without_loss(
        self, index: int, is_other: NDArray[np.bool_], logprobs: FloatArray
    ) -> None:
        """Keep what a pass found for the tokens of a datum that have no loss, [n, K]."""
        whole = self._logprobs[index]
        whole[is_other] = logprobs if whole.ndim == 2 else logprobs[:, 0]

    def found(self, microbatch: Sequence[int]) -> list[_FoundDatum]:
        """Return what a pass found for the datums of a microbatch, for another process."""
        return [
            (self._logprobs[index], self._losses[index], self._of_sequences.get(index))
            for index in microbatch
        ]

    def take_found(self, microbatch: Sequence[int], found: Sequence[_FoundDatum]) -> None:
        """Keep what a pass of another process found for the datums of a microbatch."""
        for index, (logprobs, losses, of_sequence) in zip(microbatch, found, strict=True):
            self._logprobs[index], self._losses[index] = logprobs, losses
            if of_sequence is not None:
                self._of_sequences[index] = of_sequence

    def note_experts(self, routes: Mapping[int, Routes], tokens: slice) -> None:
        """Keep which experts of each layer saw the tokens of a microbatch."""
        for layer, found in routes.items():
            seen = found.seen(tokens)
            self._experts[layer] = seen | self._experts.get(layer, seen)

    def end_microbatch(self) -> None:
        """Go on to the next microbatch; after the last one, end."""
        self._num_done += 1
        if self._num_done == len(self._microbatches):
            self._end()

    def fail(self, error: TinsmithError) -> None:
        """End with an error, the run's gradient as it was before."""
        self.undo()
        self.outcome = error

    def undo(self) -> None:
        """Leave the run's gradient as it was before, bit for bit; the batch can begin again."""
        if self._gradient_before is not None and self.run is not None:
            self.run.slot.grad_P.copy_(self._gradient_before)
            self.run.grad_norm = None
        # Without a gradient before, the row counts as empty whatever it holds.
        self._gradient_before = None
        self._microbatches = []
        self._num_done = 0

    def _end(self) -> None:
        # Sums of infinities of both signs are no numbers, which is for the caller to hear.
        with np.errstate(over="ignore", invalid="ignore"):
            found = self._metrics()
        is_finite = math.isfinite(found["loss:sum"])
        run = self.run if self.request.is_backward else None
        if run is not None:
            norm = grad_norm(run.slot.grad_P)
            # A square may overflow where no number does.
            is_finite &= math.isfinite(norm) or is_all_finite(run.slot.grad_P)
        if not is_finite:
            name = self.request.run
            whose = "the base model" if name is None else f"run {name}"
            self.fail(
                NonFiniteLossError(
                    f"the batch gave {whose} a NaN or infinite loss or gradient; a gradient "
                    "accumulated before it is unchanged",
                    run=name or "",
                    loss=found["loss:sum"],
                )
            )
            return
        if run is not None:
            run.has_gradient, run.grad_norm = True, norm
            self._gradient_before = None
        in_order = range(len(self.request.batch))
        self.outcome = BatchResult([self._logprobs[index] for index in in_order], found)

    def _metrics(self) -> dict[str, float]:
        found = self._loss_metrics()
        if self._experts:
            fractions = [float(seen.mean()) for seen in self._experts.values()]
            found["e_frac_with_tokens:mean"] = float(np.mean(fractions))
        return found

    def _loss_metrics(self) -> dict[str, float]:
        batch = self.request.batch
        scored = [self.scored(index) for index in range(len(batch))]
        config = full_config(self.request.loss, self.request.loss_config)
        inputs = [self.loss_inputs(index, is_scored) for index, is_scored in enumerate(scored)]
        # Settings by token only where a datum brought its own.
        names = [
            name
            for name in inputs[0]
            if name not in config or any(name in datum.loss_inputs for datum in batch)
        ]
        found = metrics(
            self.request.loss,
            config,
            np.concatenate([self._losses[index] for index in range(len(batch))]),
            _joined([self._logprobs[i][is_scored] for i, is_scored in enumerate(scored)]),
            {name: _joined([one[name] for one in inputs]) for name in names},
        )
        # In the order of the batch, not of the passes that found them.
        ratios = dict(sorted(self._of_sequences.items()))
        if ratios:
            found |= _sequence_metrics(batch, ratios, config)
        if "advantages" in inputs[0]:
            is_dead = [not datum.loss_inputs["advantages"].any() for datum in batch]
            found["zero_advantage_fraction:mean"] = float(np.mean(is_dead))
        return found


def is_all_finite(numbers_P: Tensor) -> bool:
    """Return whether all numbers are finite."""
    lowest, highest = torch.aminmax(numbers_P)
    return bool(torch.isfinite(lowest)) and bool(torch.isfinite(highest))


def _joined(arrays: Sequence[FloatArray]) -> FloatArray:
    """Concatenate arrays [n] or [n, K]; those with fewer targets are filled up with zeros."""
    if all(array.ndim == 1 for array in arrays):
        return np.concatenate(arrays)
    widest = max(array.shape[1] if array.ndim == 2 else 1 for array in arrays)
    columns = [array if array.ndim == 2 else array[:, None] for array in arrays]
    return np.concatenate(
        [np.pad(array, ((0, 0), (0, widest - array.shape[1]))) for array in columns]
    )


def _sequence_metrics(
    batch: Sequence[Datum], ratios: dict[int, float], config: dict[str, float]
) -> dict[str, float]:
    """Return the metrics of sequence ratios, over the tokens that have an advantage."""
    num_high = num_low = num_tokens = 0
    for index, ratio in ratios.items():
        inputs = batch[index].loss_inputs
        advantages = inputs["advantages"]
        low, high = (
            inputs.get(name, np.float32(config[name]))
            for name in ("clip_low_threshold", "clip_high_threshold")
        )
        num_high += int(((advantages > 0) & (ratio > high)).sum())
        num_low += int(((advantages < 0) & (ratio < low)).sum())
        num_tokens += int((advantages != 0).sum())
    return {
        "sequence_ratio:mean": float(np.mean(list(ratios.values()))),
        "clip_fraction:mean": (num_high + num_low) / max(1, num_tokens),
        "clip_high_fraction:mean": num_high / max(1, num_tokens),
        "clip_low_fraction:mean": num_low / max(1, num_tokens),
    }
