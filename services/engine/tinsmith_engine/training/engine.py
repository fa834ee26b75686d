"""The engine: runs on one base model, and what can be done with them.

Plain and synchronous; exactly one thread calls it (`thread.EngineThread`). Batches of many runs
are computed together (`pass_runner.py`), their optimizer steps as well. Yet the bits of a run do
not depend on which other runs exist or on what ran beside it. An operation that fails leaves its
run as it found it: gradients are restored from a copy, not by subtraction.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from tinsmith_engine.arena.adam import grad_norm
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.base.engine_thread import Parts
from tinsmith_engine.base.types import (
    AdamParams,
    AdapterConfig,
    BatchRequest,
    BatchResult,
    Datum,
    FullConfig,
    ModelInfo,
    OptimStepResult,
    RunState,
    WeightVersion,
)
from tinsmith_engine.loading.base_model import (
    IN_ONE_PROCESS,
    LoadedModel,
    ModelSharding,
    load_model,
)
from tinsmith_engine.model.model_protocol import RunTensors
from tinsmith_engine.runs.peft_export import (
    export_config,
    export_tensors,
    import_tensors_,
    view_tensors,
)
from tinsmith_engine.runs.run_store import (
    Run,
    RunStore,
    adapter_scale,
    check_config,
    check_new_run,
    same_layout,
)
from tinsmith_engine.runs.weight_versions import StagedWeights, VersionStore
from tinsmith_engine.training.batch_validation import prepare_request, validate_adam
from tinsmith_engine.training.exactness import NUM_PROBE_RUNS, check_exactness
from tinsmith_engine.training.optimizer_step import apply_step
from tinsmith_engine.training.pass_runner import PassRunner
from tinsmith_runtime.errors import (
    CheckpointIncompatibleError,
    ExactnessUnavailableError,
    NoGradientError,
    NonFiniteLossError,
    TinsmithError,
    internal_error,
)

logger = logging.getLogger(__name__)

_STATE_TENSORS = ("theta", "m", "v", "grad")

Passes = Parts[list[BatchResult | TinsmithError]]
"""A computation by passes; see `Engine.compute_by_pass`."""


class Engine:
    """All runs on one base model."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_resident_runs: int,
        micro_batch_tokens: int,
        max_pass_tokens: int,
    ) -> None:
        self.info: ModelInfo = loaded.info
        self.model = loaded.model
        self.device = loaded.device
        self.versions = VersionStore()
        self._source = loaded.source
        self._passes = PassRunner(
            loaded.model,
            loaded.device,
            copies_on_bind=loaded.info.dtype != "float32",
            micro_batch_tokens=micro_batch_tokens,
            max_pass_tokens=max_pass_tokens,
        )
        self._runs = RunStore(loaded.model, loaded.device, max_resident_runs)
        self._exported_revisions: dict[str, tuple[WeightVersion, int]] = {}

    @classmethod
    def load(
        cls,
        model_dir: str | Path,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_resident_runs: int = 64,
        max_sequence_tokens: int = 32_768,
        num_threads: int | None = None,
        micro_batch_tokens: int | None = None,
        max_pass_tokens: int = 8192,
        checkpoint_activations_over_tokens: int = 16_384,
        exact: bool | None = None,
        compiled: bool | None = None,
        sharding: ModelSharding = IN_ONE_PROCESS,
    ) -> Self:
        """Load a base model.

        Args:
            model_dir: A directory in Hugging Face layout, or a hub id.
            dtype: `float32` or `bfloat16`, for the base model. What is trained is float32.
            device: A torch device.
            max_resident_runs: How many runs may exist at a time.
            max_sequence_tokens: Longest sequence accepted, if the model allows as much.
            num_threads: Threads of an operation; None leaves torch's own choice.
            micro_batch_tokens: Tokens in one microbatch of a batch; a longer sequence is a
                microbatch of its own. Part of the numerics fingerprint. None takes 512 on a CPU,
                where more is no faster and what comes meanwhile waits for the end of a microbatch,
                and else 2048.
            max_pass_tokens: Tokens of all runs in one pass. Changes no bit.
            checkpoint_activations_over_tokens: A pass with more tokens keeps only the input of each
                layer for the backward, and computes the rest again: gradient checkpointing. Changes
                no bit.
            exact: Whether a run's bits must not depend on what is computed beside it, nor on the
                number of threads. None keeps that promise where the machine can, and else says in
                the log and in `info.exactness` that it does not.
            compiled: Whether norms, rotary embedding and SwiGLU are compiled at start; None does so
                on a GPU alone. Part of the numerics fingerprint.
            sharding: How the base model is sharded.

        Raises:
            ExactnessUnavailableError: `exact` is True, and this machine cannot keep that promise
                for the model.
            ConfigError: The kernels cannot be compiled.
            ModelNotFoundError: There is no such model, or not in a form that can be loaded.
            CheckpointIncompatibleError: The weights do not fit the model's configuration.
        """
        if micro_batch_tokens is None:
            micro_batch_tokens = 512 if torch.device(device).type == "cpu" else 2048
        load = functools.partial(
            load_model,
            model_dir,
            dtype=dtype,
            device=device,
            max_sequence_tokens=max_sequence_tokens,
            num_threads=num_threads,
            micro_batch_tokens=micro_batch_tokens,
            checkpoint_activations_over_tokens=checkpoint_activations_over_tokens,
            compiled=torch.device(device).type == "cuda" if compiled is None else compiled,
            sharding=sharding,
        )
        make: Callable[..., Self] = functools.partial(
            cls, micro_batch_tokens=micro_batch_tokens, max_pass_tokens=max_pass_tokens
        )
        ranks = sharding.engine_arguments
        loaded = load(exact=exact)
        try:
            if loaded.info.exactness == "exact":
                probed = dataclasses.replace(loaded, model=loaded.model.first_layers())
                check_exactness(make(probed, *ranks, max_resident_runs=NUM_PROBE_RUNS))
        except ExactnessUnavailableError as error:
            # What a pass gives is the same on all ranks, so they all come here or none.
            if exact:
                raise
            logger.warning("%s", error)
            # Given up before the weights are read again: two copies may not fit.
            del loaded, probed
            loaded = load(exact=False)
        return make(loaded, *ranks, max_resident_runs=max_resident_runs)

    # Runs.

    def check_new_run(self, config: AdapterConfig) -> None:
        """Check what a run that is to begin trains; may be called on any thread.

        Raises:
            InvalidFieldError: It cannot be built, or would leave out layers that it names.
        """
        check_new_run(config, self.model)

    def create_run(self, run: str, config: AdapterConfig) -> None:
        """Add a run.

        Raises:
            AlreadyExistsError: The engine has a run of this name.
            CapacityExhaustedError: All rows are taken.
            InvalidFieldError: The configuration cannot be built, such as a rank over 128.
        """
        self._runs.create(run, config)

    def drop_run(self, run: str) -> None:
        """Forget a run; versions of it that are being sampled stay until they are released.

        Raises:
            RunNotFoundError: The engine has no such run.
        """
        self._runs.drop(run)
        self.versions.retire(run)
        self._exported_revisions.pop(run, None)

    def has_run(self, run: str) -> bool:
        """Return whether the engine holds a run."""
        return run in self._runs.names()

    def runs(self) -> list[str]:
        """Return the names of all runs, in the order of their creation."""
        return self._runs.names()

    def version(self, run: str) -> int:
        """Return how many optimizer steps were applied to a run."""
        return self._runs.get(run).version

    @property
    def base(self) -> Any:
        """The base model, bound."""
        return self._passes.base

    # Training.

    def compute(self, requests: Sequence[BatchRequest]) -> list[BatchResult | TinsmithError]:
        """Score batches of any runs, and add gradients to their runs, in packed passes.

        Requests of one run take effect in their order. Each entry of the result is what its request
        would have given by itself, bit for bit, whatever the others are.

        Returns:
            For each request its result, or the error that `forward` or `forward_backward` would
            raise; a request that failed left its run's gradient as it was before it.
        """
        passes = self._compute_by_pass(requests)
        while True:
            try:
                next(passes)
            except StopIteration as end:
                found: list[BatchResult | TinsmithError] = end.value
                return found

    def compute_by_pass(self, requests: Sequence[BatchRequest]) -> Passes:
        """Do what `compute` does in parts, between which the engine may be used for other runs.

        The runs of the requests are not to be touched before the end. What is computed in between
        changes no bit.

        Yields:
            Before each pass, about how many seconds are left. What is sent in return says whether
            the pass had better be short, as other work waits for its end.

        Returns:
            What `compute` returns.
        """
        return self._compute_by_pass(requests)

    def _compute_by_pass(self, requests: Sequence[BatchRequest]) -> Passes:
        found: list[BatchResult | TinsmithError | None] = [None] * len(requests)
        valid: list[tuple[int, BatchRequest, Run | None]] = []
        for index, request in enumerate(requests):
            try:
                run = None if request.run is None else self._runs.get(request.run)
                valid.append((index, prepare_request(request, self.info), run))
            except TinsmithError as error:
                found[index] = error
        outcomes = yield from self._passes.run([(request, run) for _, request, run in valid])
        for (index, _, _), outcome in zip(valid, outcomes, strict=True):
            found[index] = outcome
        return [outcome for outcome in found if outcome is not None]

    def forward(
        self, run: str | None, batch: Sequence[Datum], loss: str, loss_config: Mapping[str, float]
    ) -> BatchResult:
        """Score a batch under a run's weights, or under the base model's if `run` is None.

        Raises:
            RunNotFoundError: The engine has no such run.
            InvalidArgumentError: See `validate_batch`.
            SequenceTooLongError: A sequence exceeds `info.max_context_tokens`.
            NonFiniteLossError: The loss is NaN or infinite.
            OutOfMemoryError: A sequence does not fit into memory.
        """
        request = BatchRequest(
            run=run, batch=batch, loss=loss, loss_config=loss_config, is_backward=False
        )
        return _result(self.compute([request])[0])

    def forward_backward(
        self, run: str, batch: Sequence[Datum], loss: str, loss_config: Mapping[str, float]
    ) -> BatchResult:
        """Score a batch and add its gradient to the run's.

        Raises:
            RunNotFoundError: The engine has no such run.
            InvalidArgumentError: See `validate_batch`.
            SequenceTooLongError: A sequence exceeds `info.max_context_tokens`.
            NonFiniteLossError: The loss or gradient is NaN or infinite. As with every error, the
                gradient that was pending is left as it was, bit for bit.
            OutOfMemoryError: A sequence does not fit into memory.
        """
        request = BatchRequest(
            run=run, batch=batch, loss=loss, loss_config=loss_config, is_backward=True
        )
        return _result(self.compute([request])[0])

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamParams]]
    ) -> list[OptimStepResult | TinsmithError]:
        """Apply one AdamW step to each of several runs, and clear their gradients.

        Returns:
            For each run, what `optim_step` would return or raise.
        """
        found: list[OptimStepResult | TinsmithError] = []
        for run, params in steps:
            try:
                found.append(self.optim_step(run, params))
            except TinsmithError as error:
                found.append(error)
            except Exception as unexpected:
                logger.error("optimizer step failed by a bug", exc_info=unexpected)
                found.append(internal_error())
        return found

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
        norm = grad_norm(state.slot.grad_P) if state.grad_norm is None else state.grad_norm
        self.clear_gradient(run)
        if not math.isfinite(norm) or not apply_step(state, params, norm):
            raise NonFiniteLossError(
                f"the step of run {run} would make its weights NaN or infinite (gradient norm "
                f"{norm}); weights are unchanged, the gradient is cleared",
                run=run,
                grad_norm=norm,
            )
        state.version += 1
        state.adam_steps += 1
        return OptimStepResult(
            version=state.version,
            metrics={"grad_norm": norm, "learning_rate": params.learning_rate},
        )

    def clear_gradient(self, run: str) -> None:
        """Forget what was accumulated since the last step."""
        # What the row still holds is overwritten by the next gradient.
        self._runs.get(run).has_gradient = False

    # State and weights in and out.

    def export_state(self, run: str) -> RunState:
        """Return a copy of all of a run's numbers."""
        state = self._runs.get(run)
        tensors = {"theta": state.slot.theta_P, "m": state.slot.m_P, "v": state.slot.v_P}
        if state.has_gradient:
            tensors["grad"] = state.slot.grad_P
        return RunState(
            config=state.config,
            version=state.version,
            tensors={name: _host_copy(numbers_P) for name, numbers_P in tensors.items()},
            has_gradient=state.has_gradient,
            adam_steps=state.adam_steps,
        )

    def import_state(self, run: str, state: RunState) -> None:
        """Put a run into an exported state, creating the run if the engine lacks it.

        Raises:
            CheckpointIncompatibleError: The state has another rank, set of layers or size; the
                run, if it existed, is unchanged.
            CapacityExhaustedError: The run is new and all rows are taken.
            InvalidFieldError: The state's configuration cannot be built.
        """
        check_config(state.config, self.model)
        if self.has_run(run) and not same_layout(self._runs.get(run).config, state.config):
            raise CheckpointIncompatibleError(
                f"run {run} is {self._runs.get(run).config}, the state is {state.config}", run=run
            )
        self._check_state(state)
        target = self._runs.get(run) if self.has_run(run) else self._runs.create(run, state.config)
        slot = target.slot
        for name, numbers_P in zip(
            _STATE_TENSORS, (slot.theta_P, slot.m_P, slot.v_P, slot.grad_P), strict=True
        ):
            if name in state.tensors:
                numbers_P.copy_(state.tensors[name])
            else:
                numbers_P.zero_()
        target.config = state.config
        target.version = state.version
        target.adam_steps = state.version if state.adam_steps is None else state.adam_steps
        target.has_gradient = state.has_gradient
        target.grad_norm = None
        target.note_new_theta()

    def adapter_tensors(self, run: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return a run's weights, float32 copies on the CPU, and PEFT's adapter configuration.

        Names are PEFT's for an adapter, and those of the Hugging Face state dict, with an empty
        configuration, for a full-parameter run.
        """
        state = self._runs.get(run)
        return (
            export_tensors(state.config, state.layout, state.slot.theta_P),
            export_config(
                state.config, self.model.lora_targets, self._source, self.model.other_modules
            ),
        )

    def weight_tensors(self, run: str) -> dict[str, Tensor]:
        """Return what `adapter_tensors` does, to be read before the run goes on: not all copies."""
        state = self._runs.get(run)
        return view_tensors(state.config, state.layout, state.slot.theta_P)

    def load_adapter_tensors(self, run: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a run's weights by tensors named as `adapter_tensors` names them.

        The moments describe weights that are gone, so they, their step count and a pending
        gradient start anew; the version stays.

        Raises:
            CheckpointIncompatibleError: Names the tensor that is absent, unknown, not floating,
                not finite or of another shape; the run is unchanged.
        """
        state = self._runs.get(run)
        import_tensors_(state.config, state.layout, state.slot.theta_P, tensors)
        for numbers_P in (state.slot.grad_P, state.slot.m_P, state.slot.v_P):
            numbers_P.zero_()
        state.adam_steps = 0
        state.has_gradient = False
        state.note_new_theta()

    # Versions, for sampling.

    def export(self, run: str) -> WeightVersion:
        """Copy a run's weights to an immutable version and return its handle.

        Exporting unchanged weights again returns the handle there is. The engine holds the newest
        version of a run; users of an older one hold it with `versions.acquire`.
        """
        state = self._runs.get(run)
        handle, revision = self._exported_revisions.get(run, (None, -1))
        if handle is not None and revision == state.revision:
            return handle
        tensors = state.tensors()
        handle = self._add_version(run, state.version, tensors, tensors.theta_P.clone())
        self._exported_revisions[run] = (handle, state.revision)
        return handle

    def is_outdated(self, handle: WeightVersion) -> bool:
        """Return whether the run of a version is here and has other weights by now."""
        if not self.has_run(handle.run):
            return False
        newest, revision = self._exported_revisions.get(handle.run, (None, -1))
        return newest != handle or revision != self._runs.get(handle.run).revision

    def load_weights(
        self, name: str, tensors: Mapping[str, Tensor], config: AdapterConfig, version: int = 0
    ) -> WeightVersion:
        """Make a version from tensors of a checkpoint, named as `adapter_tensors` names them.

        Raises:
            CheckpointIncompatibleError: See `load_adapter_tensors`.
            InvalidFieldError: The configuration cannot be built.
        """
        staged = self.stage_weights(self.weights_layout(config), tensors, config)
        return self.add_staged(name, staged, version)

    def weights_layout(self, config: AdapterConfig) -> ParameterLayout:
        """Return where the tensors of a configuration lie in a row.

        Raises:
            InvalidFieldError: The configuration cannot be built.
        """
        check_config(config, self.model)
        return self._runs.layout(config)

    def stage_weights(
        self, layout: ParameterLayout, tensors: Mapping[str, Tensor], config: AdapterConfig
    ) -> StagedWeights:
        """Make a row from tensors, and bind it; changes nothing, and may run on any thread.

        Raises:
            CheckpointIncompatibleError: See `load_adapter_tensors`.
        """
        theta_P = torch.zeros(layout.width, device=self.device)
        import_tensors_(config, layout, theta_P, tensors)
        is_full = isinstance(config, FullConfig)
        row = RunTensors(layout, theta_P, None, adapter_scale(config), is_full)
        return StagedWeights(row, self.model.bind(row))

    def add_staged(self, name: str, staged: StagedWeights, version: int) -> WeightVersion:
        """Make a version from a staged row, at once; may run on any thread."""
        return self.versions.add(name, version, staged.tensors, staged.bound)

    def weights_of(self, handle: WeightVersion) -> dict[str, Tensor]:
        """Return the tensors of a full-parameter version by their public names.

        They are views of the version, which nothing changes: any thread may read them.

        Raises:
            VersionNotLoadedError: The version had no holder any more.
        """
        row = self.versions.tensors(handle)
        return row.layout.views(row.theta_P)

    def unload_weights(self, name: str) -> None:
        """End the engine's hold on the newest version under a name; requests may still hold it.

        May run on any thread, as long as the name is not that of a run.
        """
        self.versions.retire(name)
        self._exported_revisions.pop(name, None)

    def _add_version(
        self, name: str, version: int, like: RunTensors, theta_P: Tensor
    ) -> WeightVersion:
        tensors = RunTensors(like.layout, theta_P, None, like.scale, like.is_full)
        return self.versions.add(name, version, tensors, self.model.bind(tensors))

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


def _host_copy(numbers_P: Tensor) -> Tensor:
    """Return a copy on the host; pinned if it came from a GPU, where it goes back to."""
    is_pinned = numbers_P.device.type == "cuda"
    copy_P = torch.empty(numbers_P.shape, dtype=numbers_P.dtype, pin_memory=is_pinned)
    return copy_P.copy_(numbers_P)


def _result(outcome: BatchResult | TinsmithError) -> BatchResult:
    if isinstance(outcome, TinsmithError):
        raise outcome
    return outcome
