"""Full-parameter runs on several ranks: batches, steps and state.

Each run is a sharded module of its own (`fsdp_module`). All ranks call each method together, hold
the same counts and come to the same outcome; numbers that decide it (the norm of the gradient,
whether all is finite) are added over the ranks in their order.

An operation that fails by its own numbers leaves the gradient as it was before. An exception in the
middle of a pass is another thing: FSDP's collectives cannot be left half-way, so it ends the group
(`RankFault`), and the ledger restores the run. That includes lack of memory: the batch is then a
poison operation after some restarts, and fails as such.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor

from tinsmith_engine.arena.adam import SlotBound
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.base.types import (
    AdamParams,
    BatchRequest,
    BatchResult,
    Datum,
    FullConfig,
    OptimStepResult,
    RunState,
)
from tinsmith_engine.distributed.fsdp_module import (
    ShardedModule,
    groups_of,
    local_part,
    take_part_,
    whole_tensor,
    zeros_like,
)
from tinsmith_engine.distributed.fsdp_steps import FullRun, full_grad_norm, full_step
from tinsmith_engine.distributed.process_group import RankFault, Ranks
from tinsmith_engine.distributed.serialization import decode, encode
from tinsmith_engine.losses.batch_losses import MixedLosses, SequenceLosses, losses_of
from tinsmith_engine.runs.peft_export import import_tensors_
from tinsmith_engine.training.batch_execution import BatchExecution
from tinsmith_runtime.errors import (
    CheckpointIncompatibleError,
    NoGradientError,
    NonFiniteLossError,
    TinsmithError,
)


class FullRuns:
    """All full-parameter runs of an engine.

    Args:
        ranks: All ranks.
        directory: Of the base model.
        layout: Names and shapes of all weights.
        dtype: What passes compute in.
        micro_batch_tokens: Tokens of one microbatch of a batch.
    """

    def __init__(
        self,
        ranks: Ranks,
        directory: Path,
        layout: ParameterLayout,
        dtype: torch.dtype,
        micro_batch_tokens: int,
    ) -> None:
        self._ranks = ranks
        self._directory = directory
        self._layout = layout
        self._dtype = dtype
        self._micro_batch_tokens = micro_batch_tokens
        self._runs: dict[str, FullRun] = {}

    def __contains__(self, run: object) -> bool:
        return run in self._runs

    @property
    def names(self) -> list[str]:
        """The names of all runs, in the order of their creation."""
        return list(self._runs)

    def get(self, run: str) -> FullRun:
        """Return a run that exists."""
        return self._runs[run]

    def create(self, run: str) -> None:
        """Add a run with the base model's weights."""
        module = ShardedModule(self._directory, self._layout, self._dtype, self._ranks)
        self._runs[run] = FullRun(
            module, zeros_like(module.parameters), zeros_like(module.parameters)
        )

    def drop(self, run: str) -> None:
        """Forget a run."""
        del self._runs[run]

    # Training.

    def compute(self, request: BatchRequest) -> BatchResult | TinsmithError:
        """Score a valid batch and, in a backward request, add its gradient.

        Raises:
            RankFault: A pass failed in the middle.
        """
        run = self._runs[str(request.run)]
        # The row of an adapter run is what an execution looks after; here that is done below.
        execution = BatchExecution(
            request, None, request.micro_batch_tokens or self._micro_batch_tokens
        )
        execution.begin()
        before = self._gradient_before(run) if request.is_backward else None
        try:
            for microbatch in list(execution.microbatches):
                self._run_microbatch(run, execution, microbatch)
                execution.end_microbatch()
        except TinsmithError:
            raise
        except Exception as error:
            raise RankFault(
                f"a pass of the full-parameter run {request.run} failed on rank "
                f"{self._ranks.rank}: {type(error).__name__}: {error}"
            ) from error
        if isinstance(execution.outcome, TinsmithError):
            if request.is_backward:
                self._restore_gradient(run, before)
            return execution.outcome
        if execution.outcome is None:
            raise AssertionError("a batch whose pieces are done has ended")
        if not request.is_backward:
            return execution.outcome
        if math.isfinite(full_grad_norm(run, self._ranks)):
            run.has_gradient = True
            return execution.outcome
        self._restore_gradient(run, before)
        return NonFiniteLossError(
            f"the batch gave run {request.run} a NaN or infinite loss or gradient; the gradient "
            "accumulated before it is unchanged",
            run=request.run,
            loss=execution.outcome.metrics["loss:sum"],
        )

    def optim_step(self, name: str, params: AdamParams) -> OptimStepResult:
        """Apply one AdamW step; see `Engine.optim_step`.

        Raises:
            NoGradientError: Nothing was accumulated since the last step.
            NonFiniteLossError: The gradient or the update is not finite.
        """
        run = self._runs[name]
        if not run.has_gradient:
            raise NoGradientError(
                f"run {name} has no gradient; call forward_backward first", run=name
            )
        norm = full_grad_norm(run, self._ranks)
        is_applied = math.isfinite(norm) and full_step(run, params, norm, self._ranks)
        self.clear_gradient(name)
        if not is_applied:
            raise NonFiniteLossError(
                f"the step of run {name} would make its weights NaN or infinite (gradient norm "
                f"{norm}); weights are unchanged, the gradient is cleared",
                run=name,
                grad_norm=norm,
            )
        run.version += 1
        run.adam_steps += 1
        return OptimStepResult(
            version=run.version,
            metrics={"grad_norm": norm, "learning_rate": params.learning_rate},
        )

    def clear_gradient(self, name: str) -> None:
        """Forget what was accumulated since the last step."""
        run = self._runs[name]
        run.module.clear_gradients()
        run.has_gradient = False

    # State in and out. Rank 0 alone gets whole tensors.

    def export_state(self, name: str) -> RunState | None:
        """Gather all of a run's numbers on rank 0; None elsewhere."""
        run = self._runs[name]
        sources = {"theta": run.module.parameters, "m": run.m, "v": run.v}
        if run.has_gradient:
            sources["grad"] = run.module.gradients
        rows = {key: self._row(tensors) for key, tensors in sources.items()}
        if not self._ranks.is_first:
            return None
        return RunState(
            config=FullConfig(),
            version=run.version,
            tensors={key: row for key, row in rows.items() if row is not None},
            has_gradient=run.has_gradient,
            adam_steps=run.adam_steps,
        )

    def weights(self, name: str) -> dict[str, Tensor]:
        """Gather a run's weights on rank 0; nothing elsewhere."""
        found = {}
        for weight, tensor in self._runs[name].module.parameters.items():
            whole = whole_tensor(tensor)
            if self._ranks.is_first:
                found[weight] = whole.to("cpu", copy=True)
        return found

    def import_state(self, name: str, state: RunState) -> None:
        """Put a run into a state that was checked, creating the run if there is none."""
        if name not in self._runs:
            self.create(name)
        run = self._runs[name]
        run.module.clear_gradients()
        targets = {"theta": run.module.parameters, "m": run.m, "v": run.v}
        if state.has_gradient:
            targets["grad"] = run.module.gradients
        for key, tensors in targets.items():
            for weight, tensor in tensors.items():
                take_part_(tensor, self._layout.view(state.tensors[key], weight), self._ranks)
        run.version = state.version
        run.adam_steps = state.version if state.adam_steps is None else state.adam_steps
        run.has_gradient = state.has_gradient
        run.bound = SlotBound.unknown()

    def load_weights(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a run's weights; see `Engine.load_adapter_tensors`.

        Raises:
            CheckpointIncompatibleError: A tensor is absent, unknown, not finite or of another
                shape.
        """
        run = self._runs[name]
        # Checks all of them before anything changes; the row itself is on the host, and brief.
        import_tensors_(FullConfig(), self._layout, torch.empty(self._layout.width), tensors)
        for weight, tensor in run.module.parameters.items():
            take_part_(tensor, tensors[weight], self._ranks)
        for moments in (run.m, run.v):
            for tensor in moments.values():
                local_part(tensor).zero_()
        self.clear_gradient(name)
        run.adam_steps = 0
        run.bound = SlotBound.unknown()

    def check_state(self, state: RunState) -> None:
        """Raise CheckpointIncompatibleError unless a state fits the model."""
        for key in ("theta", "m", "v", *(("grad",) if state.has_gradient else ())):
            tensor = state.tensors.get(key)
            if tensor is None or tensor.shape != (self._layout.width,):
                raise CheckpointIncompatibleError(
                    f"tensor {key} of the state must be float32 [{self._layout.width}]", tensor=key
                )

    # Parts of the above.

    def _run_microbatch(
        self, run: FullRun, execution: BatchExecution, microbatch: Sequence[int]
    ) -> None:
        batch = execution.request.batch
        groups = groups_of(
            [datum.tokens_T.size for datum in batch],
            [1 if datum.targets_T.ndim == 1 else datum.targets_T.shape[1] for datum in batch],
            microbatch,
        )
        world_size, mine = self._ranks.world_size, self._ranks.rank
        for first in range(0, len(groups), world_size):
            group = groups[first + mine] if first + mine < len(groups) else []
            self._run_group(run, execution, group)
        own = groups[mine::world_size]
        found = self._ranks.all_gather(encode([execution.found(group) for group in own]), "units")
        for rank, message in enumerate(found):
            if rank != mine:
                for group, results in zip(groups[rank::world_size], decode(message), strict=True):
                    execution.take_found(group, results)

    def _run_group(self, run: FullRun, execution: BatchExecution, group: Sequence[int]) -> None:
        """Compute a group; an empty one only helps the other ranks to theirs."""
        batch = execution.request.batch
        scored = [execution.scored(index) for index in group]
        parts = [execution.loss_rows(index, of) for index, of in zip(group, scored, strict=True)]
        losses: MixedLosses | SequenceLosses | None = None
        others = [~of for of in scored]
        tokens = torch.zeros(0, dtype=torch.int64)
        if group:
            tokens = torch.from_numpy(np.stack([batch[index].tokens_T for index in group]))
        rows, targets = _rows_and_targets([batch[index] for index in group], scored)
        if len(rows):
            some = [part for part in parts if part.num_rows]
            losses = losses_of(
                some, self._ranks.device, is_of_sequence=execution.spec.is_of_sequence
            )
        found, unlossed = run.module.score(
            tokens.to(torch.int64) if group else None,
            rows,
            targets,
            losses,
            others=_rows_and_targets([batch[index] for index in group], others),
            needs_gradient=execution.request.is_backward,
        )
        of_sequences = iter(losses.of_sequences if losses is not None else ())
        start = 0
        for index, of in zip(group, scored, strict=True):
            stop = start + int(of.sum())
            if found is None or start == stop:
                nothing = np.zeros((0, 1), dtype=np.float32)
                execution.take(index, of, nothing, nothing, None)
                continue
            logprobs, loss = found[0][start:stop], found[1].loss_NK[start:stop]
            execution.take(
                index, of, logprobs.cpu().numpy(), loss.cpu().numpy(), next(of_sequences, None)
            )
            start = stop
        start = 0
        for index, of in zip(group, others, strict=True):
            stop = start + int(of.sum())
            if unlossed is not None and start < stop:
                execution.take_without_loss(index, of, unlossed[start:stop].cpu().numpy())
            start = stop

    def _gradient_before(self, run: FullRun) -> list[Tensor] | None:
        if not run.has_gradient:
            run.module.clear_gradients()
            return None
        return [local_part(tensor).clone() for tensor in run.module.gradients.values()]

    def _restore_gradient(self, run: FullRun, before: Sequence[Tensor] | None) -> None:
        if before is None:
            run.module.clear_gradients()
            return
        for tensor, old in zip(run.module.gradients.values(), before, strict=True):
            local_part(tensor).copy_(old)

    def _row(self, tensors: Mapping[str, DTensor]) -> Tensor | None:
        """Gather tensors into a row of the layout on rank 0, one tensor at a time."""
        row = torch.zeros(self._layout.width) if self._ranks.is_first else None
        for name, tensor in tensors.items():
            whole = whole_tensor(tensor)
            if row is not None:
                self._layout.view(row, name).copy_(whole)
        return row


def _rows_and_targets(
    datums: Sequence[Datum], chosen: Sequence[NDArray[np.bool_]]
) -> tuple[Tensor, Tensor]:
    """Return which rows of a group of datums are chosen, int64 [M], and their targets [M, K]."""
    if not datums:
        nothing = torch.zeros(0, dtype=torch.int64)
        return nothing, nothing
    found = [datum.targets_T[of] for datum, of in zip(datums, chosen, strict=True)]
    targets = np.concatenate([one[:, None] if one.ndim == 1 else one for one in found])
    rows = np.flatnonzero(np.concatenate(chosen))
    return torch.from_numpy(rows), torch.from_numpy(targets).to(torch.int64)
