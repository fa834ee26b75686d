"""The engine of one rank; on rank 0, the engine that a trainer drives.

The same class on all ranks, with the methods of `Engine`. On rank 0, once it leads, each method
that changes something is a command to all ranks (`leader_commands.py`); what only reads is answered
from rank 0's own copy, since all ranks hold the same runs. A follower makes the calls that it is
sent.

While the model is loaded and probed, no rank leads and all ranks run the same program. A method
called there is called on all of them anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tinsmith_engine.base.types import (
    AdamParams,
    AdapterConfig,
    BatchRequest,
    BatchResult,
    FullConfig,
    OptimStepResult,
    RunState,
    WeightVersion,
)
from tinsmith_engine.distributed.fsdp_files import export_model, load_run, save_run
from tinsmith_engine.distributed.fsdp_runs import FullRuns
from tinsmith_engine.distributed.leader_commands import Leader
from tinsmith_engine.distributed.process_group import RankFault, Ranks
from tinsmith_engine.distributed.sharded_decoder import ShardedDecoder
from tinsmith_engine.distributed.sharded_passes import ShardedPassRunner
from tinsmith_engine.files.hub_files import resolve_model
from tinsmith_engine.loading.base_model import DTYPES, LoadedModel
from tinsmith_engine.training.batch_validation import prepare_request, validate_adam
from tinsmith_engine.training.engine import Engine, Passes
from tinsmith_runtime.errors import (
    AlreadyExistsError,
    CapacityExhaustedError,
    CheckpointIncompatibleError,
    InvalidFieldError,
    TinsmithError,
)


class ShardedEngine(Engine):
    """All runs on one base model, on several ranks.

    Args:
        loaded: The model.
        ranks: All ranks.
        max_resident_runs: See `Engine`.
        micro_batch_tokens: See `Engine`.
        max_pass_tokens: See `Engine`.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        ranks: Ranks,
        *,
        max_resident_runs: int,
        micro_batch_tokens: int,
        max_pass_tokens: int,
    ) -> None:
        super().__init__(
            loaded,
            max_resident_runs=max_resident_runs,
            micro_batch_tokens=micro_batch_tokens,
            max_pass_tokens=max_pass_tokens,
        )
        self.ranks = ranks
        stream = loaded.model.stream if isinstance(loaded.model, ShardedDecoder) else None
        self._passes = ShardedPassRunner(
            loaded.model,
            ranks,
            stream,
            copies_on_bind=loaded.info.dtype != "float32",
            micro_batch_tokens=micro_batch_tokens,
            max_pass_tokens=max_pass_tokens,
        )
        self._max_resident_runs = max_resident_runs
        self._directory = resolve_model(loaded.source)
        self._full = FullRuns(
            ranks,
            self._directory,
            loaded.model.full_layout,
            DTYPES[loaded.info.dtype],
            micro_batch_tokens,
        )
        self._leader: Leader | None = None
        self._name = ""
        self._is_inside = False

    def lead(self, leader: Leader, name: str) -> None:
        """From now on send every change to the other ranks' engines of this name."""
        self._leader, self._name = leader, name

    def perform(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Make a call of rank 0 on this rank.

        Raises:
            RankFault: There is no such call.
        """
        if method not in _COMMANDS:
            raise RankFault(f"rank 0 asks for {method}, which is no command")
        return getattr(self, method)(*arguments)

    # Runs.

    def create_run(self, run: str, config: AdapterConfig) -> None:
        """Add a run; see `Engine.create_run`."""
        self._everywhere("create_run", (run, config), lambda: self._create(run, config))

    def drop_run(self, run: str) -> None:
        """Forget a run; see `Engine.drop_run`."""
        if run in self._full:
            self._everywhere("drop_run", (run,), lambda: self._full.drop(run))
        else:
            self._everywhere("drop_run", (run,), lambda: Engine.drop_run(self, run))

    def has_run(self, run: str) -> bool:
        """Return whether the engine holds a run."""
        return run in self._full or super().has_run(run)

    def runs(self) -> list[str]:
        """Return the names of all runs."""
        return [*super().runs(), *self._full.names]

    def version(self, run: str) -> int:
        """Return how many optimizer steps were applied to a run."""
        return self._full.get(run).version if run in self._full else super().version(run)

    def _create(self, run: str, config: AdapterConfig) -> None:
        if self.has_run(run):
            raise AlreadyExistsError(f"run {run} exists in this engine", run=run)
        if len(self.runs()) >= self._max_resident_runs:
            raise CapacityExhaustedError(
                f"all {self._max_resident_runs} places for runs are taken; release a run first",
                max_resident_runs=self._max_resident_runs,
            )
        if isinstance(config, FullConfig):
            self._full.create(run)
        else:
            Engine.create_run(self, run, config)

    # Training.

    def compute(self, requests: Sequence[BatchRequest]) -> list[BatchResult | TinsmithError]:
        """Score batches and add gradients; see `Engine.compute`.

        Full-parameter runs are computed after the others, one by one.
        """
        found: list[BatchResult | TinsmithError] = self._everywhere(
            "compute", (list(requests),), lambda: self._compute(requests)
        )
        return found

    def compute_by_pass(self, requests: Sequence[BatchRequest]) -> Passes:
        """Compute as one part: all ranks follow one command; see `Engine.compute_by_pass`."""
        yield 0.0
        return self.compute(requests)

    def _compute(self, requests: Sequence[BatchRequest]) -> list[BatchResult | TinsmithError]:
        packed = iter(Engine.compute(self, [one for one in requests if one.run not in self._full]))
        shared = [None if one.run in self._full else next(packed) for one in requests]
        found: list[BatchResult | TinsmithError] = []
        for request, outcome in zip(requests, shared, strict=True):
            found.append(self._compute_full(request) if outcome is None else outcome)
        return found

    def _compute_full(self, request: BatchRequest) -> BatchResult | TinsmithError:
        try:
            prepared = prepare_request(request, self.info)
        except TinsmithError as error:
            return error
        return self._full.compute(prepared)

    def optim_steps(
        self, steps: Sequence[tuple[str, AdamParams]]
    ) -> list[OptimStepResult | TinsmithError]:
        """Apply optimizer steps; see `Engine.optim_steps`."""
        found: list[OptimStepResult | TinsmithError] = self._everywhere(
            "optim_steps", (list(steps),), lambda: Engine.optim_steps(self, steps)
        )
        return found

    def optim_step(self, run: str, params: AdamParams) -> OptimStepResult:
        """Apply one optimizer step; see `Engine.optim_step`."""

        def here() -> OptimStepResult:
            if run not in self._full:
                return Engine.optim_step(self, run, params)
            validate_adam(params)
            return self._full.optim_step(run, params)

        found: OptimStepResult = self._everywhere("optim_step", (run, params), here)
        return found

    def clear_gradient(self, run: str) -> None:
        """Forget a gradient; see `Engine.clear_gradient`."""
        if run in self._full:
            self._everywhere("clear_gradient", (run,), lambda: self._full.clear_gradient(run))
        else:
            self._everywhere("clear_gradient", (run,), lambda: Engine.clear_gradient(self, run))

    # State and weights in and out. What is gathered comes to rank 0 alone.

    def export_state(self, run: str) -> RunState:
        """Return a copy of all of a run's numbers; see `Engine.export_state`."""
        if run not in self._full:
            return super().export_state(run)
        found: RunState = self._gather("export_state", run, lambda: self._full.export_state(run))
        return found

    def import_state(self, run: str, state: RunState) -> None:
        """Put a run into a state; see `Engine.import_state`."""

        def here() -> None:
            is_full = isinstance(state.config, FullConfig)
            if self.has_run(run) and is_full != (run in self._full):
                raise CheckpointIncompatibleError(
                    f"run {run} and the state are not of one kind", run=run
                )
            if not is_full:
                Engine.import_state(self, run, state)
                return
            self._full.check_state(state)
            if run not in self._full:
                self._create(run, state.config)
            self._full.import_state(run, state)

        self._everywhere("import_state", (run, state), here)

    def adapter_tensors(self, run: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return a run's weights; see `Engine.adapter_tensors`."""
        if run not in self._full:
            return super().adapter_tensors(run)
        found: tuple[dict[str, Tensor], dict[str, Any]] = self._gather(
            "adapter_tensors", run, lambda: (self._full.weights(run), {})
        )
        return found

    def weight_tensors(self, run: str) -> dict[str, Tensor]:
        """Return a run's weights; see `Engine.weight_tensors`."""
        return self.adapter_tensors(run)[0] if run in self._full else super().weight_tensors(run)

    def load_adapter_tensors(self, run: str, tensors: Mapping[str, Tensor]) -> None:
        """Replace a run's weights; see `Engine.load_adapter_tensors`."""

        def here() -> None:
            if run in self._full:
                self._full.load_weights(run, tensors)
            else:
                Engine.load_adapter_tensors(self, run, tensors)

        self._everywhere("load_adapter_tensors", (run, dict(tensors)), here)

    def export(self, run: str) -> WeightVersion:
        """Copy a run's weights to a version, on rank 0; see `Engine.export`.

        Raises:
            InvalidFieldError: All weights are trained: no rank has them.
        """
        if run in self._full:
            raise InvalidFieldError(
                "run", f"{run} is spread over ranks; sample from a saved checkpoint of it"
            )
        return super().export(run)

    # Files of full-parameter runs, in a folder that all ranks see.

    def save_full_run(self, run: str, folder: str) -> None:
        """Write a full-parameter run, each rank its part; see `fsdp_files`."""
        self._everywhere(
            "save_full_run",
            (run, folder),
            lambda: save_run(self._full.get(run), Path(folder), self.ranks),
        )

    def load_full_run(self, run: str, folder: str) -> None:
        """Read what `save_full_run` wrote, with any number of ranks.

        Raises:
            CheckpointCorruptError: A file is absent or cannot be read; import a state then.
        """
        self._everywhere(
            "load_full_run", (run, folder), lambda: load_run(self._full.get(run), Path(folder))
        )

    def export_full_run(self, run: str, folder: str) -> None:
        """Write the model of a full-parameter run in Hugging Face layout."""
        self._everywhere(
            "export_full_run",
            (run, folder),
            lambda: export_model(self._full.get(run), self._directory, Path(folder), self.ranks),
        )

    def _gather(self, method: str, run: str, gather: Callable[[], Any]) -> Any:
        """Call what returns something on rank 0 alone, which the ranks do not compare."""
        gathered: list[Any] = []
        self._everywhere(method, (run,), lambda: gathered.append(gather()))
        return gathered[0] if self.ranks.is_first else None

    def _everywhere(self, method: str, arguments: tuple[Any, ...], here: Callable[[], Any]) -> Any:
        # A method that another one calls is part of that one's command.
        if self._leader is None or self._is_inside:
            return here()
        self._is_inside = True
        try:
            return self._leader.call(self._name, method, arguments, here)
        finally:
            self._is_inside = False


_COMMANDS = frozenset(
    {
        "create_run",
        "drop_run",
        "compute",
        "optim_steps",
        "optim_step",
        "clear_gradient",
        "import_state",
        "load_adapter_tensors",
        "export_state",
        "adapter_tensors",
        "save_full_run",
        "load_full_run",
        "export_full_run",
    }
)
