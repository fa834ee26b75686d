"""The engine: runs on one base model, and what can be done with them.

Plain and synchronous; exactly one thread calls it (`thread.EngineThread`). An operation sees its
own run and the frozen base, and its split into micro-batches depends on its batch alone. So its
bits do not depend on which other runs exist or on what ran before. An operation that fails leaves
its run as it found it: gradients are restored from a copy, not by subtraction.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from tinsmith_engine.adam import adamw_
from tinsmith_engine.adapters import export_config, export_tensors, import_tensors_
from tinsmith_engine.batches import validate_adam, validate_batch
from tinsmith_engine.factory import LoadedModel, load_model
from tinsmith_engine.models import RunTensors
from tinsmith_engine.run_store import Run, RunStore, adapter_scale, check_config, same_layout
from tinsmith_engine.scoring import Scorer
from tinsmith_engine.values import (
    AdamParams,
    AdapterConfig,
    BatchRequest,
    Datum,
    ForwardResult,
    FullConfig,
    ModelInfo,
    OptimStepResult,
    Published,
    RunState,
)
from tinsmith_engine.versions import VersionStore
from tinsmith_runtime.errors import (
    CheckpointIncompatibleError,
    NoGradientError,
    NonFiniteLossError,
    OutOfMemoryError,
    TinsmithError,
)
from tinsmith_runtime.status import internal_error

logger = logging.getLogger(__name__)

_OUT_OF_MEMORY_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")
ArgsT = ParamSpec("ArgsT")
ResultT = TypeVar("ResultT")

_STATE_TENSORS = ("theta", "m", "v", "grad")


class Engine:
    """All runs on one base model."""

    def __init__(self, loaded: LoadedModel, *, max_rows: int, micro_batch_tokens: int) -> None:
        self.info: ModelInfo = loaded.info
        self.model = loaded.model
        self.device = loaded.device
        self.versions = VersionStore()
        self._source = loaded.source
        self._copies_on_bind = loaded.info.dtype != "float32"
        self._scorer = Scorer(loaded.model, loaded.device, micro_batch_tokens)
        self._runs = RunStore(loaded.model, loaded.device, max_rows)
        self._base = loaded.model.bind(None)
        self._rollback: Tensor | None = None
        self._published_revisions: dict[str, tuple[Published, int]] = {}

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_rows: int = 64,
        max_sequence_tokens: int = 32_768,
        num_threads: int | None = None,
        micro_batch_tokens: int = 2048,
    ) -> Engine:
        """Load a base model.

        Args:
            model_dir: A directory in Hugging Face layout, or a hub id.
            dtype: `float32` or `bfloat16`, for the base model. What is trained is float32.
            device: A torch device.
            max_rows: How many runs may exist at a time.
            max_sequence_tokens: Longest sequence accepted, if the model allows as much.
            num_threads: Threads of an operation; None leaves torch's own choice.
            micro_batch_tokens: Tokens in one pass; a longer sequence is a pass of its own.

        Raises:
            ModelNotFoundError: There is no such model, or not in a form that can be loaded.
            CheckpointIncompatibleError: The weights do not fit the model's configuration.
        """
        loaded = load_model(
            model_dir,
            dtype=dtype,
            device=device,
            max_sequence_tokens=max_sequence_tokens,
            num_threads=num_threads,
            micro_batch_tokens=micro_batch_tokens,
        )
        return cls(loaded, max_rows=max_rows, micro_batch_tokens=micro_batch_tokens)

    # Runs.

    def create_run(self, run: str, config: AdapterConfig) -> None:
        """Add a run.

        Raises:
            AlreadyExistsError: The engine has a run of this name.
            CapacityExhaustedError: All rows are taken.
            InvalidFieldError: The configuration can not be built, such as a rank over 128.
        """
        self._runs.create(run, config)

    def drop_run(self, run: str) -> None:
        """Forget a run; versions of it that are being sampled stay until they are released.

        Raises:
            RunNotFoundError: The engine has no such run.
        """
        self._runs.drop(run)
        self.versions.retire(run)
        self._published_revisions.pop(run, None)

    def has_run(self, run: str) -> bool:
        """Return whether the engine holds a run."""
        return run in self._runs.names()

    def runs(self) -> list[str]:
        """Return the names of all runs, in the order of their creation."""
        return self._runs.names()

    def version(self, run: str) -> int:
        """Return how many optimizer steps were applied to a run."""
        return self._runs.get(run).version

    # Training.

    def compute(self, requests: Sequence[BatchRequest]) -> list[ForwardResult | TinsmithError]:
        """Score the batches of many runs; those of one run in order.

        Returns:
            A result or an error for each request. An error leaves its run's gradient as it was
            before that request and touches nobody else; a bug is an `InternalError` in its place.
        """
        return [_attempt(self._compute, request) for request in requests]

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamParams]]
    ) -> list[OptimStepResult | TinsmithError]:
        """Step distinct runs; see `optim_step` for what each entry can be."""
        return [_attempt(self.optim_step, run, params) for run, params in steps]

    def _compute(self, request: BatchRequest) -> ForwardResult:
        if request.run is not None and request.is_backward:
            result = self.forward_backward(
                request.run,
                request.batch,
                request.loss,
                request.loss_config,
                micro_batch_tokens=request.micro_batch_tokens,
            )
        else:
            result = self.forward(
                request.run,
                request.batch,
                request.loss,
                request.loss_config,
                micro_batch_tokens=request.micro_batch_tokens,
            )
        result.micro_batch_tokens = request.micro_batch_tokens or 0
        return result

    def forward(
        self,
        run: str | None,
        batch: Sequence[Datum],
        loss: str,
        loss_config: Mapping[str, float],
        *,
        micro_batch_tokens: int | None = None,
    ) -> ForwardResult:
        """Score a batch under a run's weights, or under the base model's if `run` is None.

        Raises:
            RunNotFoundError: The engine has no such run.
            InvalidArgumentError: See `validate_batch`.
            SequenceTooLongError: A sequence exceeds `info.max_context_tokens`.
            OutOfMemoryError: A micro-batch does not fit into memory.
        """
        bound = self._base if run is None else self._bound(self._runs.get(run))
        validate_batch(batch, loss, loss_config, self.info)
        scorer = self._scorer_of(micro_batch_tokens)
        return scorer.score(bound, batch, loss, loss_config, needs_gradient=False)

    def forward_backward(
        self,
        run: str,
        batch: Sequence[Datum],
        loss: str,
        loss_config: Mapping[str, float],
        *,
        micro_batch_tokens: int | None = None,
    ) -> ForwardResult:
        """Score a batch and add its gradient to the run's.

        Raises:
            RunNotFoundError: The engine has no such run.
            InvalidArgumentError: See `validate_batch`.
            SequenceTooLongError: A sequence exceeds `info.max_context_tokens`.
            NonFiniteLossError: The loss or gradient is NaN or infinite. As with every error, the
                gradient that was pending is left as it was, bit for bit.
            OutOfMemoryError: A micro-batch does not fit into memory.
        """
        state = self._runs.get(run)
        validate_batch(batch, loss, loss_config, self.info)
        grad_P = state.row.grad_P
        before_P = grad_P.clone() if state.has_gradient else None
        try:
            result = self._scorer_of(micro_batch_tokens).score(
                self._bound(state), batch, loss, loss_config, needs_gradient=True
            )
            if not np.isfinite(result.metrics["loss:sum"]) or not _is_finite(grad_P):
                raise NonFiniteLossError(
                    f"the batch gave run {run} a NaN or infinite loss or gradient; the gradient "
                    "accumulated before it is unchanged",
                    run=run,
                    loss=result.metrics["loss:sum"],
                )
        except BaseException:
            if before_P is None:
                grad_P.zero_()
            else:
                grad_P.copy_(before_P)
            raise
        state.has_gradient = True
        return result

    def _scorer_of(self, micro_batch_tokens: int | None) -> Scorer:
        if micro_batch_tokens is None:
            return self._scorer
        return dataclasses.replace(self._scorer, micro_batch_tokens=micro_batch_tokens)

    def optim_step(self, run: str, params: AdamParams) -> OptimStepResult:
        """Apply one AdamW step with the accumulated gradient, and clear the gradient.

        Raises:
            RunNotFoundError: The engine has no such run.
            InvalidFieldError: A hyper-parameter is out of range.
            NoGradientError: Nothing was accumulated since the last step.
            NonFiniteLossError: The gradient or the update is not finite; weights and moments are
                unchanged, the gradient is cleared.
        """
        state = self._runs.get(run)
        validate_adam(params)
        if not state.has_gradient:
            raise NoGradientError(
                f"run {run} has no gradient; call forward_backward first", run=run
            )
        row = state.row
        grad_norm = float(torch.linalg.vector_norm(row.grad_P))
        changed = (row.theta_P, row.m_P, row.v_P)
        before = self._rollback_copies(changed)
        try:
            adamw_(
                row.theta_P[None],
                row.grad_P[None],
                row.m_P[None],
                row.v_P[None],
                [state.adam_steps + 1],
                [params],
                [grad_norm],
            )
        except BaseException:
            for numbers_P, old_P in zip(changed, before, strict=True):
                numbers_P.copy_(old_P)
            raise
        self.clear_gradient(run)
        if not (np.isfinite(grad_norm) and all(_is_finite(numbers_P) for numbers_P in changed)):
            for numbers_P, old_P in zip(changed, before, strict=True):
                numbers_P.copy_(old_P)
            raise NonFiniteLossError(
                f"the step of run {run} would make its weights NaN or infinite (gradient norm "
                f"{grad_norm}); weights are unchanged, the gradient is cleared",
                run=run,
                grad_norm=grad_norm,
            )
        state.version += 1
        state.adam_steps += 1
        self._note_new_theta(state)
        return OptimStepResult(
            version=state.version,
            metrics={"grad_norm": grad_norm, "learning_rate": params.learning_rate},
        )

    def _rollback_copies(self, changed: Sequence[Tensor]) -> list[Tensor]:
        """Return copies that the next step overwrites: fresh memory would be paged in each time."""
        shape = (len(changed), changed[0].numel())
        if self._rollback is None or self._rollback.shape != shape:
            self._rollback = torch.empty(shape, dtype=changed[0].dtype, device=self.device)
        for copy_P, numbers_P in zip(self._rollback, changed, strict=True):
            copy_P.copy_(numbers_P)
        return list(self._rollback)

    def clear_gradient(self, run: str) -> None:
        """Forget what was accumulated since the last step."""
        state = self._runs.get(run)
        state.row.grad_P.zero_()
        state.has_gradient = False

    # State and weights in and out.

    def export_state(self, run: str) -> RunState:
        """Return a copy of all of a run's numbers."""
        state = self._runs.get(run)
        tensors = {"theta": state.row.theta_P, "m": state.row.m_P, "v": state.row.v_P}
        if state.has_gradient:
            tensors["grad"] = state.row.grad_P
        return RunState(
            config=state.config,
            version=state.version,
            tensors={name: numbers_P.to("cpu", copy=True) for name, numbers_P in tensors.items()},
            has_gradient=state.has_gradient,
            adam_steps=state.adam_steps,
        )

    def import_state(self, run: str, state: RunState) -> None:
        """Put a run into an exported state, creating the run if the engine lacks it.

        Raises:
            CheckpointIncompatibleError: The state has another rank, set of layers or size; the
                run, if it existed, is unchanged.
            CapacityExhaustedError: The run is new and all rows are taken.
            InvalidFieldError: The state's configuration can not be built.
        """
        check_config(state.config, self.model.lora_units)
        if self.has_run(run) and not same_layout(self._runs.get(run).config, state.config):
            raise CheckpointIncompatibleError(
                f"run {run} is {self._runs.get(run).config}, the state is {state.config}", run=run
            )
        self._check_state(state)
        target = self._runs.get(run) if self.has_run(run) else self._runs.create(run, state.config)
        row = target.row
        for name, numbers_P in zip(
            _STATE_TENSORS, (row.theta_P, row.m_P, row.v_P, row.grad_P), strict=True
        ):
            if name in state.tensors:
                numbers_P.copy_(state.tensors[name])
            else:
                numbers_P.zero_()
        target.config = state.config
        target.version = state.version
        target.adam_steps = state.version if state.adam_steps is None else state.adam_steps
        target.has_gradient = state.has_gradient
        target.note_new_theta()

    def adapter_tensors(self, run: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return a run's weights, float32 copies on the CPU, and PEFT's adapter configuration.

        Names are PEFT's for an adapter, and those of the Hugging Face state dict, with an empty
        configuration, for a full-parameter run.
        """
        state = self._runs.get(run)
        return (
            export_tensors(state.config, state.layout, state.row.theta_P),
            export_config(state.config, self.model.lora_units, self._source),
        )

    def load_adapter_tensors(self, run: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a run's weights by tensors named as `adapter_tensors` names them.

        The moments describe weights that are gone, so they, their step count and a pending
        gradient start anew; the version stays.

        Raises:
            CheckpointIncompatibleError: Names the tensor that is absent, unknown, not floating,
                not finite or of another shape; the run is unchanged.
        """
        state = self._runs.get(run)
        import_tensors_(state.config, state.layout, state.row.theta_P, tensors)
        for numbers_P in (state.row.grad_P, state.row.m_P, state.row.v_P):
            numbers_P.zero_()
        state.adam_steps = 0
        state.has_gradient = False
        state.note_new_theta()

    # Versions, for sampling.

    def publish(self, run: str) -> Published:
        """Copy a run's weights to an immutable version and return its handle.

        Publishing unchanged weights again returns the handle there is. The engine holds the newest
        version of a run; whoever needs an older one holds it with `versions.acquire`.
        """
        state = self._runs.get(run)
        published, revision = self._published_revisions.get(run, (None, -1))
        if published is not None and revision == state.revision:
            return published
        tensors = state.tensors()
        published = self._add_version(run, state.version, tensors, tensors.theta_P.clone())
        self._published_revisions[run] = (published, state.revision)
        return published

    def load_weights(
        self, name: str, tensors: Mapping[str, Tensor], config: AdapterConfig, version: int = 0
    ) -> Published:
        """Make a version from tensors of a checkpoint, named as `adapter_tensors` names them.

        Raises:
            CheckpointIncompatibleError: See `load_adapter_tensors`.
            InvalidFieldError: The configuration can not be built.
        """
        check_config(config, self.model.lora_units)
        layout = self._runs.layout(config)
        theta_P = torch.zeros(layout.width, device=self.device)
        import_tensors_(config, layout, theta_P, tensors)
        is_full = isinstance(config, FullConfig)
        like = RunTensors(layout, theta_P, None, adapter_scale(config), is_full)
        return self._add_version(name, version, like, theta_P)

    def unload_weights(self, name: str) -> None:
        """End the engine's hold on the newest version under a name; requests may still hold it."""
        self.versions.retire(name)
        self._published_revisions.pop(name, None)

    def _add_version(self, name: str, version: int, like: RunTensors, theta_P: Tensor) -> Published:
        tensors = RunTensors(like.layout, theta_P, None, like.scale, like.is_full)
        return self.versions.add(name, version, tensors, self.model.bind(tensors))

    def _bound(self, run: Run) -> Any:
        if run.bound is None:
            run.bound = self.model.bind(run.tensors())
        return run.bound

    def _note_new_theta(self, run: Run) -> None:
        bound = run.bound
        run.note_new_theta()
        if not self._copies_on_bind and not isinstance(run.config, FullConfig):
            run.bound = bound

    def _check_state(self, state: RunState) -> None:
        width = self._runs.layout(state.config).width
        for name in ("theta", "m", "v", *(("grad",) if state.has_gradient else ())):
            tensor = state.tensors.get(name)
            if tensor is None or tensor.shape != (width,) or tensor.dtype != torch.float32:
                found = "absent" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"
                raise CheckpointIncompatibleError(
                    f"tensor {name} of the state must be float32 [{width}], it is {found}",
                    tensor=name,
                )


def _is_finite(numbers_P: Tensor) -> bool:
    # One pass without a temporary; aminmax propagates NaN.
    lowest, highest = torch.aminmax(numbers_P)
    return bool(torch.isfinite(lowest)) and bool(torch.isfinite(highest))


def _attempt(
    work: Callable[ArgsT, ResultT], *args: ArgsT.args, **kwargs: ArgsT.kwargs
) -> ResultT | TinsmithError:
    """Return what a call returns, or its error; what is not typed is a lack of memory or a bug."""
    try:
        return work(*args, **kwargs)
    except TinsmithError as error:
        return error
    except Exception as unexpected:
        text = str(unexpected).lower()
        is_memory = any(phrase in text for phrase in _OUT_OF_MEMORY_PHRASES)
        if is_memory or isinstance(unexpected, MemoryError):
            return OutOfMemoryError(
                "the operation does not fit into memory; send fewer or shorter sequences"
            )
        logger.error("operation failed by a bug", exc_info=unexpected)
        return internal_error()
