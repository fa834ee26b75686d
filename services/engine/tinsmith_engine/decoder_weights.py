"""The decoder's weights as views of a row, and the adapters that rows of a pass wear.

The base model is one row of the full layout in its own dtype. Adapter runs read that row and wear
their own adapter rows; a full-parameter run brings a row that replaces it. Rows are float32
masters: where the base model is bfloat16, binding makes the copy that the pass computes with, while
gradients are still added to the float32 row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor

from tinsmith_engine.decoder_config import DecoderConfig, head_unit, layer_units
from tinsmith_engine.linear import AdaptedRows, LinearUnit
from tinsmith_engine.lora import LoraUnit
from tinsmith_engine.models import BoundRows, RunTensors
from tinsmith_engine.row_ladder import RowLadder
from tinsmith_engine.rows import RowLayout
from tinsmith_engine.units import UnitSpec

LAYER_UNITS = 4
"""Units of a layer, in the order of `decoder_config.layer_units`."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm's weight, and its float32 gradient view if it is trained."""

    weight: Tensor
    grad: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block."""

    input_norm: Norm
    qkv: LinearUnit
    qk_norm: Tensor | None
    """q and k norm weights, repeated for each head: [heads of q and k, D]."""
    qk_norm_grads: tuple[Tensor, Tensor] | None
    """Views for q and for k, [D] each."""
    o: LinearUnit
    post_norm: Norm
    gate_up: LinearUnit
    down: LinearUnit


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything that one pass reads and, with gradient views, adds to."""

    embedding: Tensor
    embedding_grad: Tensor | None
    layers: Sequence[LayerWeights]
    final_norm: Norm
    head: LinearUnit
    trains_input: bool
    """Whether the gradient must reach the embedding."""

    def with_layers(self, layers: Sequence[LayerWeights]) -> DecoderWeights:
        """Return the weights with other layers."""
        return dataclasses.replace(self, layers=layers)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The adapters of a stack of runs, by unit: those of each layer in turn, then the head's."""

    units: tuple[LoraUnit | None, ...]


def bind_weights(
    config: DecoderConfig,
    layout: RowLayout,
    base_row: Tensor,
    run: RunTensors | None,
    ladder: RowLadder,
    head_ladder: RowLadder,
) -> DecoderWeights:
    """Return the weights of a full-parameter run, or of the base model."""
    row, grad_row = base_row, None
    if run is not None:
        row, grad_row = run.theta_P.to(base_row.dtype), run.grad_P
    return _Binder(config, layout, row, grad_row, ladder, head_ladder).bind()


def bind_adapters(specs: Sequence[UnitSpec], dtype: torch.dtype, run: RunTensors) -> AdapterWeights:
    """Return the adapters of a run, or of a stack of runs, in the dtype of the passes."""
    width = run.layout.width
    theta_RP = run.theta_P.view(-1, width) if run.theta_P.dim() == 1 else run.theta_P
    theta_RP = theta_RP.to(dtype)
    grad_RP = run.grad_P
    if grad_RP is not None and grad_RP.dim() == 1:
        grad_RP = grad_RP[None]
    return AdapterWeights(
        tuple(LoraUnit.of(spec, run.layout, theta_RP, grad_RP, run.scale) for spec in specs)
    )


def wear(
    weights: DecoderWeights, adapted: Sequence[BoundRows[DecoderWeights | AdapterWeights]]
) -> DecoderWeights:
    """Return weights whose layers apply adapters to some rows of a pass.

    The head is left as it is: its chunks have rows of their own (`head.py`).
    """
    if not adapted:
        return weights
    worn: Sequence[LayerWeights] = _WornLayers(weights.layers, adapted)
    if isinstance(weights.layers, tuple):
        worn = tuple(worn)
    return weights.with_layers(worn)


class _WornLayers(Sequence[LayerWeights]):
    """Layers that put on their adapters when they are read: they may not be in memory before."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        adapted: Sequence[BoundRows[DecoderWeights | AdapterWeights]],
    ) -> None:
        self._layers, self._adapted = layers, adapted

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            return [self[one] for one in range(*index.indices(len(self)))]
        layer, first = self._layers[index], index * LAYER_UNITS
        return dataclasses.replace(
            layer,
            qkv=self._unit(layer.qkv, first),
            o=self._unit(layer.o, first + 1),
            gate_up=self._unit(layer.gate_up, first + 2),
            down=self._unit(layer.down, first + 3),
        )

    def _unit(self, plain: LinearUnit, index: int) -> LinearUnit:
        worn = []
        for one in self._adapted:
            if not isinstance(one.bound, AdapterWeights):
                raise TypeError("rows wear adapters, not whole models")
            lora = one.bound.units[index]
            if lora is not None:
                worn.append(AdaptedRows(one.rows, lora, one.accumulates))
        return plain.adapt(tuple(worn))


def bind_layer(
    config: DecoderConfig, layout: RowLayout, row: Tensor, index: int, ladder: RowLadder
) -> LayerWeights:
    """Return one frozen layer, from a row that may hold no other."""
    return _Binder(config, layout, row, None, ladder, ladder).layer(index)


@dataclass(frozen=True, slots=True)
class _Binder:
    config: DecoderConfig
    layout: RowLayout
    row: Tensor
    grad_row: Tensor | None
    ladder: RowLadder
    head_ladder: RowLadder

    def bind(self) -> DecoderWeights:
        embedding = "model.embed_tokens.weight"
        head = head_unit(self.config)
        return DecoderWeights(
            embedding=self.layout.view(self.row, embedding),
            embedding_grad=self._grad([embedding]),
            layers=tuple(self.layer(index) for index in range(self.config.num_layers)),
            final_norm=self._norm("model.norm.weight"),
            head=dataclasses.replace(
                self._unit(head, [embedding] if self.config.is_tied else ["lm_head.weight"]),
                ladder=self.head_ladder,
            ),
            trains_input=self.grad_row is not None,
        )

    def layer(self, index: int) -> LayerWeights:
        """Return one layer."""
        prefix = f"model.layers.{index}"
        qkv, o, gate_up, down = layer_units(self.config, index)
        qk_norm, qk_norm_grads = None, None
        if self.config.has_qk_norm:
            names = [f"{prefix}.self_attn.{name}_norm.weight" for name in "qk"]
            q, k = (self.layout.view(self.row, name) for name in names)
            heads = (self.config.num_heads, self.config.num_kv_heads)
            qk_norm = torch.cat([q.expand(heads[0], -1), k.expand(heads[1], -1)])
            if self.grad_row is not None:
                q_grad, k_grad = (self.layout.view(self.grad_row, name) for name in names)
                qk_norm_grads = (q_grad, k_grad)
        return LayerWeights(
            input_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._unit(qkv),
            qk_norm=qk_norm,
            qk_norm_grads=qk_norm_grads,
            o=self._unit(o),
            post_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=self._unit(gate_up),
            down=self._unit(down),
        )

    def _norm(self, name: str) -> Norm:
        return Norm(self.layout.view(self.row, name), self._grad([name]))

    def _unit(self, spec: UnitSpec, weights: Sequence[str] | None = None) -> LinearUnit:
        weights = weights or [f"{name}.weight" for name in spec.names]
        biases = [f"{name}.bias" for name in spec.names]
        has_bias = biases[0] in self.layout
        return LinearUnit(
            weight=self.layout.fused(self.row, weights),
            ladder=self.ladder,
            bias=self.layout.fused(self.row, biases) if has_bias else None,
            weight_grad=self._grad(weights),
            bias_grad=self._grad(biases) if has_bias else None,
        )

    def _grad(self, names: Sequence[str]) -> Tensor | None:
        return None if self.grad_row is None else self.layout.fused(self.grad_row, names)
