"""Which linear modules of a model may carry adapters, and how an adapter lies in a row."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.base.types import LoraConfig


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Linear modules that read the same input and are computed as one, and their sizes."""

    names: tuple[str, ...]
    """Module paths, such as `model.layers.0.self_attn.q_proj`, in the order of their rows."""
    num_inputs: int
    num_outputs: tuple[int, ...]
    kind: str
    """`attention`, `mlp` or `unembedding`."""

    def is_adapted_by(self, config: LoraConfig) -> bool:
        """Return whether an adapter of this configuration has matrices for the target."""
        return {
            "attention": config.train_attention,
            "mlp": config.train_mlp,
            "unembedding": config.train_unembedding,
        }[self.kind]

    @property
    def a_names(self) -> list[str]:
        """The tensors that A is made of, in order."""
        return [f"{name}.lora_A.weight" for name in self.names]

    @property
    def b_names(self) -> list[str]:
        """The tensors that hold each part's B."""
        return [f"{name}.lora_B.weight" for name in self.names]


@dataclass(frozen=True, slots=True)
class ExpertSpecs:
    """The same target of every expert of a layer: equal sizes, one after the other in a row."""

    experts: tuple[TargetSpec, ...]

    @property
    def first(self) -> TargetSpec:
        """The target of expert 0."""
        return self.experts[0]


LayerSpec = TargetSpec | ExpertSpecs
"""What a decoder computes as one: a target, or the targets of all experts."""


def target_specs(specs: Iterable[LayerSpec]) -> list[TargetSpec]:
    """Return all targets, those of each expert apart."""
    return [
        target
        for spec in specs
        for target in (spec.experts if isinstance(spec, ExpertSpecs) else (spec,))
    ]


def lora_layout(specs: Sequence[TargetSpec], config: LoraConfig) -> ParameterLayout:
    """Return the layout of an adapter: for each target all A [rank, in], then all B [out, rank].

    Names are those of the modules plus `.lora_A.weight` and `.lora_B.weight`.
    """
    tensors: list[tuple[str, tuple[int, ...]]] = []
    for spec in specs:
        if not spec.is_adapted_by(config):
            continue
        tensors += [(name, (config.rank, spec.num_inputs)) for name in spec.a_names]
        tensors += [
            (name, (size, config.rank))
            for name, size in zip(spec.b_names, spec.num_outputs, strict=True)
        ]
    return ParameterLayout(tensors)


def initialise_lora_(theta_P: Tensor, layout: ParameterLayout, seed: int) -> None:
    """Fill an adapter as PEFT does: A kaiming-uniform with a = sqrt(5), B zero.

    That bound is 1 / sqrt(in). Numbers come from a CPU generator of the run's own, in layout
    order, so they depend on the seed and the layout alone.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, entry in layout.entries.items():
        if ".lora_A." in name:
            bound = 1.0 / math.sqrt(entry.shape[1])
            values = torch.empty(entry.shape).uniform_(-bound, bound, generator=generator)
            layout.view(theta_P, name).copy_(values)
