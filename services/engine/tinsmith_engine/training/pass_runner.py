"""Computes the batches of many runs in packed passes.

All microbatches that are next in their runs go through the model together, as many as a pass holds;
then the microbatches after them. Forward passes need no order and take what fits. A full-parameter
run has weights of its own and so passes of its own; so has a loss that a client wrote, for which
no other run waits in the middle of a pass.

Between two passes the engine may do something else, for other runs: so a batch of any size is a
long job in parts, and a pass is kept short where that costs little.

What fails is an operation, never its neighbours. A non-finite loss or gradient is found by run. An
exception of a pass (out of memory, a bug) does not say whose it is: every operation that had not
ended is undone and computed again by itself. There a lack of memory splits the batch further,
down to single sequences. What is computed again gives the same bits, except where the
split had to change; the result then says so, for a replay.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from tinsmith_engine.base.engine_thread import Parts
from tinsmith_engine.base.memory import is_out_of_memory
from tinsmith_engine.base.types import BatchRequest, BatchResult, IntArray, LoraConfig
from tinsmith_engine.losses.batch_losses import MixedLosses, SequenceLosses, losses_of
from tinsmith_engine.model.lm_head import HeadGroup, NoLosses, RowLosses
from tinsmith_engine.model.model_protocol import BoundRows, Model, Pass, RunTensors
from tinsmith_engine.packing.images import rope_positions
from tinsmith_engine.packing.packing import PackedRows, pack
from tinsmith_engine.runs.run_store import Run, adapter_scale
from tinsmith_engine.training.adapter_groups import AdapterUse, fill_passes, group_adapters
from tinsmith_engine.training.batch_execution import BatchExecution
from tinsmith_runtime.errors import InternalError, OutOfMemoryError, TinsmithError, internal_error

logger = logging.getLogger(__name__)

_MAX_BOUND_GROUPS = 64
_SHORT_PASS_S, _LEAST_SHORT_TOKENS = 0.03, 128
"""On a CPU, about how long a pass takes for whose end other work waits, and what it holds at least.
Passes of 256 tokens cost up to 8 % more than large ones, those of 128 up to 45 %."""
_CPU_PASS_TOKENS = 512
"""Larger passes are no faster on a CPU, and whatever comes waits longer for their end."""
_SPEED_WEIGHT = 0.2
"""Of the newest pass in the moving average of the speed."""

Segment = tuple[BatchExecution, list[int]]
"""A batch in execution and the datums of its microbatch."""


class PassRunner:
    """Runs batch requests through a model.

    Args:
        model: The model.
        device: Where it computes.
        copies_on_bind: Whether bound adapters are copies, to be made anew when theta changes.
        micro_batch_tokens: Tokens of one microbatch of a batch.
        max_pass_tokens: Rows of a pass; a larger microbatch is a pass of its own.
    """

    def __init__(
        self,
        model: Model[Any],
        device: torch.device,
        *,
        copies_on_bind: bool,
        micro_batch_tokens: int,
        max_pass_tokens: int,
    ) -> None:
        self._model = model
        self._device = device
        self._copies_on_bind = copies_on_bind
        self._micro_batch_tokens = micro_batch_tokens
        self._max_pass_tokens = max_pass_tokens
        # Rows each second of forward passes, and of those with a backward; 0 before the first one.
        self._speeds = {False: 0.0, True: 0.0}
        self._base = model.bind(None)
        self._bound_groups: OrderedDict[tuple[object, ...], Any] = OrderedDict()

    @property
    def base(self) -> Any:
        """The base model, bound."""
        return self._base

    def run(
        self, requests: Sequence[tuple[BatchRequest, Run | None]]
    ) -> Parts[list[BatchResult | TinsmithError]]:
        """Compute valid requests, those of one run in order; see `Engine.compute_by_pass`."""
        executions = [
            BatchExecution(request, run, request.micro_batch_tokens or self._micro_batch_tokens)
            for request, run in requests
        ]
        try:
            yield from self._run_together(executions)
        except Exception as error:
            logger.warning(
                "a pass failed; its operations are computed one by one",
                extra={"operations": len(executions), "problem": str(error)},
            )
        # Outside of the handler, whose exception holds on to the memory of the failed pass.
        unfinished = [execution for execution in executions if execution.outcome is None]
        for execution in unfinished:
            execution.undo()
        for execution in unfinished:
            yield from self._run_alone(execution)
        return [self._outcome(execution) for execution in executions]

    def _outcome(self, execution: BatchExecution) -> BatchResult | TinsmithError:
        if execution.outcome is None:
            raise AssertionError("a batch that was run has ended")
        has_own_split = execution.micro_batch_tokens != self._micro_batch_tokens
        if isinstance(execution.outcome, BatchResult) and has_own_split:
            execution.outcome.micro_batch_tokens = execution.micro_batch_tokens
        return execution.outcome

    def _run_together(self, executions: Sequence[BatchExecution]) -> Parts[None]:
        waiting = [execution for execution in executions if execution.request.is_backward]
        forward = [execution for execution in executions if not execution.request.is_backward]
        yield from self._run_forward(forward)
        while waiting:
            wave = _first_of_each_run(waiting)
            for execution in wave:
                if not execution.is_begun:
                    self._begin_backward(execution)
            segments = [
                (execution, microbatch)
                for execution in wave
                for microbatch in self._next_microbatches(execution)
            ]
            rows_left = sum(execution.rows_left for execution in waiting)
            yield from self._run_segments(segments, rows_left, needs_gradient=True)
            waiting = [execution for execution in waiting if execution.outcome is None]

    def _run_forward(self, executions: Sequence[BatchExecution]) -> Parts[None]:
        segments = []
        for execution in executions:
            execution.begin()
            segments += [(execution, microbatch) for microbatch in execution.microbatches]
        rows_left = sum(execution.rows_left for execution in executions)
        yield from self._run_segments(segments, rows_left, needs_gradient=False)

    def _run_segments(
        self, segments: Sequence[Segment], rows_left: int, *, needs_gradient: bool
    ) -> Parts[None]:
        """Compute segments, no two of a run if they have a gradient, and end their microbatches.

        Args:
            segments: What is computed, in as many passes as it takes.
            rows_left: What is to be computed from here on, these segments included.
            needs_gradient: Whether they are computed backward as well.
        """
        waiting = list(segments)
        while waiting:
            is_shared = yield self._seconds(rows_left, needs_gradient=needs_gradient)
            max_tokens = self._pass_tokens(bool(is_shared), needs_gradient=needs_gradient)
            part = self._passes(waiting, max_tokens)[0]
            taken = {id(segment) for segment in part}
            waiting = [segment for segment in waiting if id(segment) not in taken]
            num_rows = sum(execution.rows_of(microbatch) for execution, microbatch in part)
            rows_left -= num_rows
            begin_s = time.perf_counter()
            self._run_pass(part, needs_gradient=needs_gradient)
            duration_s = time.perf_counter() - begin_s
            self._note_speed(num_rows / max(duration_s, 1e-6), needs_gradient=needs_gradient)
            for execution, _ in part:
                execution.end_microbatch()

    def _run_alone(self, execution: BatchExecution) -> Parts[None]:
        while execution.outcome is None:
            try:
                yield from self._run_together([execution])
            except Exception as error:
                execution.undo()
                self._split_or_fail(execution, error)

    def _pass_tokens(self, is_shared: bool, *, needs_gradient: bool) -> int:
        """Return how many rows a pass holds; that changes no bit."""
        if self._device.type != "cpu":
            return self._max_pass_tokens
        short = max(int(self._speeds[needs_gradient] * _SHORT_PASS_S), _LEAST_SHORT_TOKENS)
        return min(short if is_shared else _CPU_PASS_TOKENS, self._max_pass_tokens)

    def _note_speed(self, newest: float, *, needs_gradient: bool) -> None:
        known = self._speeds[needs_gradient]
        self._speeds[needs_gradient] = known + _SPEED_WEIGHT * (newest - known) if known else newest

    def _seconds(self, num_rows: int, *, needs_gradient: bool) -> float:
        """Return how long rows are to take; 0 before anything was measured."""
        speed = self._speeds[needs_gradient]
        return num_rows / speed if speed else 0.0

    def _split_or_fail(self, execution: BatchExecution, error: Exception) -> None:
        if isinstance(error, TinsmithError):
            execution.fail(error)
            return
        if not is_out_of_memory(error):
            logger.error("operation failed by a bug", exc_info=error)
            bug: InternalError = internal_error()
            execution.fail(bug)
            return
        lengths = [datum.tokens_T.size for datum in execution.request.batch]
        tokens = min(execution.micro_batch_tokens, sum(lengths))
        if (tokens <= max(lengths) and len(lengths) == 1) or tokens <= min(lengths):
            execution.fail(
                OutOfMemoryError(
                    f"a sequence of {max(lengths)} tokens does not fit into the memory of the "
                    "device; send shorter sequences",
                    num_tokens=max(lengths),
                )
            )
            return
        execution.micro_batch_tokens = max(tokens // 2, 1)
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        logger.warning(
            "batch split further, memory did not suffice",
            extra={"micro_batch_tokens": execution.micro_batch_tokens},
        )

    def _next_microbatches(self, execution: BatchExecution) -> list[list[int]]:
        """Return the microbatches that are computed beside each other: here the next one."""
        return execution.microbatches[:1]

    def _begin_backward(self, execution: BatchExecution) -> None:
        execution.begin()
        self._clear_gradient(execution)

    def _clear_gradient(self, execution: BatchExecution) -> None:
        """Empty the gradient slot if a first microbatch adds to it and does not overwrite it."""
        run = execution.run
        if run is not None and not execution.accumulates and not self._overwrites(run):
            run.slot.grad_P.zero_()

    def _overwrites(self, run: Run) -> bool:
        """Whether the first microbatch of a gradient writes every number of the row."""
        return (
            self._model.groups_adapters
            and isinstance(run.config, LoraConfig)
            and not run.config.train_unembedding
        )

    def _adds_to_gradient(self, execution: BatchExecution, run: Run) -> bool:
        """Whether the gradient of the next microbatch is added to the row rather than put there."""
        return execution.accumulates or not (
            execution.request.is_backward and self._overwrites(run)
        )

    def _passes(self, segments: Sequence[Segment], max_tokens: int) -> list[list[Segment]]:
        """Part segments into passes: some by themselves, others by their rows."""
        alone = [[one] for one in segments if _is_alone(one[0])]
        shared = [one for one in segments if not _is_alone(one[0])]
        sized = ((one, one[0].rows_of(one[1])) for one in shared)
        return alone + fill_passes(sized, max_tokens)

    def _run_pass(self, segments: Sequence[Segment], *, needs_gradient: bool) -> None:
        groups = group_adapters(
            [self._adapter_use(execution, microbatch) for execution, microbatch in segments],
            groups_adapters=self._model.groups_adapters,
        )
        segments = [segments[index] for group in groups for index in group]
        rows = pack(
            [
                [execution.request.batch[index].tokens_T for index in microbatch]
                for execution, microbatch in segments
            ],
            quantum=self._model.row_quantum,
            device=self._device,
            positions=_rope_positions(segments),
        )
        images = [
            (first + image.position, image)
            for (execution, microbatch), sequences in zip(segments, rows.sequences, strict=True)
            for index, (first, _) in zip(microbatch, sequences, strict=True)
            for image in execution.request.batch[index].images
        ]
        adapted, first = [], 0
        for group in groups:
            members = [execution for execution, _ in segments[first : first + len(group)]]
            used = self._bound_rows(members, rows, first)
            adapted += [used] if used is not None else []
            first += len(group)
        one = segments[0][0].run
        weights = self._bound_full(one) if one is not None and one.is_full else self._base
        heads = _Heads(self._model, segments, rows, adapted, self._device)
        one_pass: Pass[Any] = Pass(rows, weights, adapted, heads.groups, images)
        scores = self._model.score(one_pass, needs_gradient=needs_gradient)
        heads.hand_out([(found.logprobs, found.loss) for found in scores])
        start = 0
        for (execution, _), sequences in zip(segments, rows.sequences, strict=True):
            stop = start + sum(length for _, length in sequences)
            execution.note_experts(one_pass.routes, slice(start, stop))
            start = stop

    def _adapter_use(
        self, execution: BatchExecution, microbatch: Sequence[int]
    ) -> AdapterUse | None:
        run = execution.run
        if run is None or run.is_full:
            return None
        return AdapterUse(
            run.arena,
            run.slot.index,
            adapter_scale(run.config),
            self._adds_to_gradient(execution, run),
            execution.rows_of(microbatch),
        )

    def _bound_rows(
        self, members: Sequence[BatchExecution], rows: PackedRows, first: int
    ) -> BoundRows[Any] | None:
        """Return the rows of an adapter group, whose segments begin with the given one."""
        runs = [
            execution.run
            for execution in members
            if execution.run is not None and not execution.run.is_full
        ]
        if not runs:
            return None
        place = slice(rows.segments[first].start, rows.segments[first + len(runs) - 1].stop)
        # The members of an adapter group are alike in this.
        return BoundRows(
            place, self._bound_group(runs), self._adds_to_gradient(members[0], runs[0])
        )

    def _bound_group(self, runs: Sequence[Run]) -> Any:
        revisions = tuple(run.revision for run in runs) if self._copies_on_bind else ()
        indices = [run.slot.index for run in runs]
        scale = adapter_scale(runs[0].config)
        key = (id(runs[0].arena), tuple(indices), scale, revisions)
        bound = self._bound_groups.get(key)
        if bound is None:
            theta_RP, grad_RP = runs[0].arena.slot_views(indices)
            bound = self._model.bind(
                RunTensors(runs[0].layout, theta_RP, grad_RP, scale, is_full=False)
            )
            self._bound_groups[key] = bound
            while len(self._bound_groups) > _MAX_BOUND_GROUPS:
                self._bound_groups.popitem(last=False)
        self._bound_groups.move_to_end(key)
        return bound

    def _bound_full(self, run: Run) -> Any:
        if run.bound is None:
            run.bound = self._model.bind(run.tensors())
        return run.bound


def _is_alone(execution: BatchExecution) -> bool:
    """Whether the passes of a batch hold nothing else."""
    return execution.run is not None and execution.run.is_full


class _Heads:
    """Which rows of a pass are scored: grouped by targets, kind of loss and adapter of the head."""

    def __init__(
        self,
        model: Model[Any],
        segments: Sequence[Segment],
        rows: PackedRows,
        adapted: Iterable[BoundRows[Any]],
        device: torch.device,
    ) -> None:
        self._parts: dict[tuple[object, ...], list[_Part]] = {}
        self._losses: list[MixedLosses | SequenceLosses] = []
        self.groups: list[HeadGroup] = []
        self._others: dict[tuple[object, ...], list[_Part]] = {}
        loras = _head_adapters(model, rows, adapted)
        for segment, (execution, microbatch) in enumerate(segments):
            for index, (start, _) in zip(microbatch, rows.sequences[segment], strict=True):
                is_scored = execution.scored(index)
                targets = execution.request.batch[index].targets_T
                num_targets = 1 if targets.ndim == 1 else targets.shape[1]
                adapter = segment if segment in loras else None
                if not is_scored.all():
                    # Apart, so that the rows with a loss have the same chunks, and bits, without.
                    others = _Part(execution, index, start, ~is_scored)
                    self._others.setdefault((num_targets, adapter), []).append(others)
                if not is_scored.any():
                    nothing = np.zeros((0, 1), dtype=np.float32)
                    execution.take(index, is_scored, nothing, nothing, None)
                    continue
                key: tuple[object, ...] = (num_targets, execution.spec.is_of_sequence, adapter)
                self._parts.setdefault(key, []).append(_Part(execution, index, start, is_scored))
        for key, parts in self._parts.items():
            losses = [part.execution.loss_rows(part.index, part.is_scored) for part in parts]
            found = losses_of(losses, device, is_of_sequence=bool(key[1]))
            self._losses.append(found)
            self.groups.append(_group(parts, found, loras.get(key[2]), device))
        for key, parts in self._others.items():
            self.groups.append(_group(parts, NoLosses(), loras.get(key[1]), device))

    def hand_out(self, scores: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Give each batch what was found for its datums."""
        with_losses, others = scores[: len(self._parts)], scores[len(self._parts) :]
        for parts, losses, found in zip(
            self._parts.values(), self._losses, with_losses, strict=True
        ):
            logprobs, loss = (values.cpu().numpy() for values in found)
            of_sequences = losses.of_sequences
            start = 0
            for number, part in enumerate(parts):
                stop = start + int(part.is_scored.sum())
                part.execution.take(
                    part.index,
                    part.is_scored,
                    logprobs[start:stop],
                    loss[start:stop],
                    of_sequences[number] if of_sequences else None,
                )
                start = stop
        for parts, (found_logprobs, _) in zip(self._others.values(), others, strict=True):
            logprobs, start = found_logprobs.cpu().numpy(), 0
            for part in parts:
                stop = start + int(part.is_scored.sum())
                part.execution.take_without_loss(part.index, part.is_scored, logprobs[start:stop])
                start = stop


def _group(parts: Sequence[_Part], losses: RowLosses, lora: Any, device: torch.device) -> HeadGroup:
    return HeadGroup(
        rows=torch.from_numpy(np.concatenate([part.rows for part in parts])).to(device),
        targets=torch.from_numpy(np.concatenate([part.targets for part in parts])).to(device),
        losses=losses,
        lora=lora,
    )


class _Part:
    """Tokens of one datum in a pass: those with a loss, or the others."""

    def __init__(self, execution: BatchExecution, index: int, start: int, is_scored: Any) -> None:
        self.execution, self.index, self.is_scored = execution, index, is_scored
        self.rows = start + np.flatnonzero(is_scored)
        targets = execution.request.batch[index].targets_T[is_scored].astype(np.int64, copy=False)
        self.targets = targets[:, None] if targets.ndim == 1 else targets


def _head_adapters(
    model: Model[Any], rows: PackedRows, adapted: Iterable[BoundRows[Any]]
) -> dict[object, Any]:
    """Return the adapter of the unembedding by segment, where there is one."""
    found: dict[object, Any] = {}
    for used in adapted:
        members = [
            index
            for index, one in enumerate(rows.segments)
            if used.rows.start <= one.start < used.rows.stop
        ]
        for place, segment in enumerate(members):
            lora = model.head_adapter(used.bound, place)
            if lora is not None:
                found[segment] = lora
    return found


def _rope_positions(segments: Sequence[Segment]) -> list[list[IntArray]] | None:
    """Return the positions of each sequence where some have images, [3, T] each."""
    batches = [
        [execution.request.batch[index] for index in microbatch]
        for execution, microbatch in segments
    ]
    if not any(datum.images for batch in batches for datum in batch):
        return None
    return [
        [rope_positions(datum.tokens_T.size, datum.images) for datum in batch] for batch in batches
    ]


def _first_of_each_run(executions: Iterable[BatchExecution]) -> list[BatchExecution]:
    """Return the first batch of each run: what may be computed now."""
    first: dict[str, BatchExecution] = {}
    for execution in executions:
        if execution.run is None:
            raise ValueError("the base model has no gradient")
        first.setdefault(execution.run.name, execution)
    return list(first.values())
