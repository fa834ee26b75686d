"""Which runs exist and which rows they own.

Rows of equal layout share an arena (`slots.py`).
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import torch

from tinsmith_engine.arena.adam import SlotBound
from tinsmith_engine.arena.adapter_targets import initialise_lora_, lora_layout
from tinsmith_engine.arena.slots import Arena, ParameterLayout, Slot
from tinsmith_engine.base.types import AdapterConfig, FullConfig, LoraConfig
from tinsmith_engine.model.model_protocol import Model, RunTensors
from tinsmith_runtime.errors import (
    AlreadyExistsError,
    CapacityExhaustedError,
    InvalidFieldError,
    RunNotFoundError,
)

MAX_RANK = 128
_REVISIONS = itertools.count()


@dataclass(slots=True)
class Run:
    """One run in memory."""

    name: str
    config: AdapterConfig
    arena: Arena
    slot: Slot
    version: int = 0
    adam_steps: int = 0
    """Steps since the moments were zero: differs from `version` once weights were loaded."""
    has_gradient: bool = False
    grad_norm: float | None = None
    """L2 norm of the gradient; None if it is not known."""
    revision: int = field(default_factory=lambda: next(_REVISIONS))
    """Changes with theta, for holders of a copy of it. No two runs ever have the same one: a row
    passes from a run that is dropped to the next."""
    slot_bound: SlotBound = field(default_factory=SlotBound.unknown)
    bound: Any = None
    """Of a full-parameter run, what its model reads; made on first use."""

    @property
    def layout(self) -> ParameterLayout:
        """Where each tensor lies in the row."""
        return self.arena.layout

    @property
    def is_full(self) -> bool:
        """Whether all weights are trained."""
        return isinstance(self.config, FullConfig)

    def tensors(self) -> RunTensors:
        """Return the run as a model binds to it."""
        return RunTensors(
            layout=self.layout,
            theta_P=self.slot.theta_P,
            grad_P=self.slot.grad_P,
            scale=adapter_scale(self.config),
            is_full=self.is_full,
        )

    def note_new_theta(self) -> None:
        """Record that theta was written to by something else than a step."""
        self.note_step(SlotBound.unknown())

    def note_step(self, bound: SlotBound) -> None:
        """Record that theta was written to, and a bound of what the row holds now."""
        self.slot_bound = bound
        self.revision = next(_REVISIONS)
        self.bound = None


def adapter_scale(config: AdapterConfig) -> float:
    """Return what an adapter's product is multiplied by."""
    return config.alpha / config.rank if isinstance(config, LoraConfig) else 1.0


def check_config(config: AdapterConfig, model: Model[Any]) -> None:
    """Raise InvalidFieldError for a run that cannot be built on the model."""
    if isinstance(config, FullConfig):
        if not model.trains_all:
            raise InvalidFieldError(
                "adapter.full", "cannot be trained: the vision tower of this model is frozen"
            )
        return
    if not 1 <= config.rank <= MAX_RANK:
        raise InvalidFieldError("lora.rank", f"must be 1 to {MAX_RANK}, got {config.rank}")
    if not 0.0 < config.alpha < float("inf"):
        raise InvalidFieldError("lora.alpha", f"must be positive and finite, got {config.alpha}")
    if not -(1 << 63) <= config.seed < 1 << 63:
        raise InvalidFieldError("lora.seed", f"must fit into 64 bits, got {config.seed}")
    if not any(target.is_adapted_by(config) for target in model.lora_targets):
        raise InvalidFieldError("lora", "trains no layer of this model")


def check_new_run(config: AdapterConfig, model: Model[Any]) -> None:
    """Raise InvalidFieldError for a run that is not to begin on the model.

    Beside what cannot be built that is an adapter which would leave out layers that it names.
    """
    check_config(config, model)
    if isinstance(config, LoraConfig) and config.train_mlp and model.unreachable_experts:
        raise InvalidFieldError(
            "lora.train_mlp",
            "must be false for this model: an adapter does not reach its experts, whose matrices "
            f"are one tensor ({model.unreachable_experts[0]}); train attention alone, or all "
            "weights",
        )
    if not isinstance(config, LoraConfig):
        return
    for kind, is_asked in (("attention", config.train_attention), ("mlp", config.train_mlp)):
        layer = model.unreachable_layers.get(kind)
        if is_asked and layer is not None:
            raise InvalidFieldError(
                f"lora.train_{kind}",
                "must be false for this model: an adapter does not reach layers such as "
                f"{layer}, which are no linear layers of torch; train all weights",
            )


@dataclass(slots=True)
class RunStore:
    """All runs of an engine."""

    model: Model[Any]
    device: torch.device
    max_resident_runs: int
    _runs: dict[str, Run] = field(default_factory=dict)
    _arenas: dict[tuple[object, ...], Arena] = field(default_factory=dict)

    def create(self, name: str, config: AdapterConfig) -> Run:
        """Add a run with the initial weights of its configuration.

        Raises:
            AlreadyExistsError: A run has this name.
            CapacityExhaustedError: All rows are taken.
            InvalidFieldError: The configuration cannot be built.
        """
        check_config(config, self.model)
        if name in self._runs:
            raise AlreadyExistsError(f"run {name} exists in this engine", run=name)
        if len(self._runs) >= self.max_resident_runs:
            raise CapacityExhaustedError(
                f"all {self.max_resident_runs} places for runs are taken; release a run first",
                max_resident_runs=self.max_resident_runs,
            )
        arena = self._arena(config)
        run = Run(name, config, arena, arena.take())
        if isinstance(config, LoraConfig):
            initialise_lora_(run.slot.theta_P, run.layout, config.seed)
        else:
            run.slot.theta_P.copy_(self.model.initial_parameters())
        self._runs[name] = run
        return run

    def drop(self, name: str) -> None:
        """Remove a run and free its row.

        Raises:
            RunNotFoundError: No run has this name.
        """
        run = self.get(name)
        self._arena(run.config).give_back(run.slot)
        del self._runs[name]

    def get(self, name: str) -> Run:
        """Return a run.

        Raises:
            RunNotFoundError: No run has this name.
        """
        if name not in self._runs:
            raise RunNotFoundError(f"run {name} is not loaded in this engine", run=name)
        return self._runs[name]

    def names(self) -> list[str]:
        """Return the names of all runs, in the order of their creation."""
        return list(self._runs)

    def layout(self, config: AdapterConfig) -> ParameterLayout:
        """Return the row layout of a configuration."""
        return self._arena(config).layout

    def _arena(self, config: AdapterConfig) -> Arena:
        key = _layout_key(config)
        if key not in self._arenas:
            layout = (
                lora_layout(self.model.lora_targets, config)
                if isinstance(config, LoraConfig)
                else self.model.full_layout
            )
            self._arenas[key] = Arena(layout, self.device)
        return self._arenas[key]


def _layout_key(config: AdapterConfig) -> tuple[object, ...]:
    """Return what decides a layout: equal keys share an arena."""
    if isinstance(config, FullConfig):
        return ("full",)
    return (config.rank, config.train_attention, config.train_mlp, config.train_unembedding)


def same_layout(left: AdapterConfig, right: AdapterConfig) -> bool:
    """Return whether a state of one configuration fits a row of the other."""
    return _layout_key(left) == _layout_key(right)
