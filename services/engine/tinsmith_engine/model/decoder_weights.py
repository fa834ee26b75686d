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

from tinsmith_engine.arena.adapter_targets import ExpertSpecs, LayerSpec, UnitSpec
from tinsmith_engine.arena.rows import RowLayout
from tinsmith_engine.base.types import IntArray
from tinsmith_engine.lora.expert_lora import ExpertLora
from tinsmith_engine.lora.lora import LoraUnit
from tinsmith_engine.model.decoder_config import DecoderConfig, head_unit, layer_units, router_name
from tinsmith_engine.model.experts import AdaptedExperts, ExpertUnit, MoeMlp
from tinsmith_engine.model.linear import AdaptedRows, LinearUnit
from tinsmith_engine.model.mlp import DenseMlp
from tinsmith_engine.model.model_protocol import BoundRows, RunTensors
from tinsmith_engine.packing.moe_routing import Routes
from tinsmith_engine.products.ops import EAGER, Ops
from tinsmith_engine.products.split_products import KSplit

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
    mlp: DenseMlp | MoeMlp


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

    units: tuple[LoraUnit | ExpertLora | None, ...]

    def linear(self, index: int) -> LoraUnit | None:
        """Return the adapters of a unit that is not one of experts."""
        unit = self.units[index]
        if isinstance(unit, ExpertLora):
            raise TypeError(f"unit {index} is one of experts")
        return unit

    def experts(self, index: int) -> ExpertLora | None:
        """Return the adapters of a unit of experts."""
        unit = self.units[index]
        if isinstance(unit, LoraUnit):
            raise TypeError(f"unit {index} is not one of experts")
        return unit


def bind_weights(
    config: DecoderConfig,
    layout: RowLayout,
    base_row: Tensor,
    run: RunTensors | None,
    split: KSplit,
    ops: Ops = EAGER,
) -> DecoderWeights:
    """Return the weights of a full-parameter run, or of the base model."""
    row, grad_row = base_row, None
    if run is not None:
        row, grad_row = run.theta_P.to(base_row.dtype), run.grad_P
    return _Binder(config, layout, row, grad_row, split, ops).bind()


def bind_adapters(
    specs: Sequence[LayerSpec], dtype: torch.dtype, run: RunTensors
) -> AdapterWeights:
    """Return the adapters of a run, or of a stack of runs, in the dtype of the passes."""
    width = run.layout.width
    theta_RP = run.theta_P.view(-1, width) if run.theta_P.dim() == 1 else run.theta_P
    theta_RP = theta_RP.to(dtype)
    grad_RP = run.grad_P
    if grad_RP is not None and grad_RP.dim() == 1:
        grad_RP = grad_RP[None]
    # See `lora`: a batch of one is another kernel then.
    is_doubled = len(theta_RP) == 1 and (dtype != torch.float32 or theta_RP.device.type == "cuda")
    dense_RP = theta_RP.repeat(2, 1) if is_doubled else theta_RP
    return AdapterWeights(
        tuple(
            ExpertLora.of(spec, run.layout, theta_RP, grad_RP, run.scale)
            if isinstance(spec, ExpertSpecs)
            else LoraUnit.of(spec, run.layout, dense_RP, grad_RP, run.scale, is_doubled=is_doubled)
            for spec in specs
        )
    )


def wear(
    weights: DecoderWeights,
    adapted: Sequence[BoundRows[DecoderWeights | AdapterWeights]],
    tokens: IntArray,
    routes: dict[int, Routes] | None = None,
) -> DecoderWeights:
    """Return weights whose layers apply adapters to some rows of a pass.

    The head is left as it is: its chunks have rows of their own (`head.py`).

    Args:
        weights: What all rows see.
        adapted: What some rows wear.
        tokens: The rows that are tokens; others are filling, which no expert needs to see.
        routes: Where to leave which experts the tokens went to, by layer.
    """
    # Layers that are not in memory, a sharded base's, are dense, and are not read for nothing.
    in_memory = weights.layers if isinstance(weights.layers, tuple) else ()
    if not adapted and not any(isinstance(layer.mlp, MoeMlp) for layer in in_memory):
        return weights
    worn: Sequence[LayerWeights] = _WornLayers(weights.layers, adapted, tokens, routes)
    if isinstance(weights.layers, tuple):
        worn = tuple(worn)
    return weights.with_layers(worn)


class _WornLayers(Sequence[LayerWeights]):
    """Layers that put on their adapters when they are read: they may not be in memory before."""

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        adapted: Sequence[BoundRows[DecoderWeights | AdapterWeights]],
        tokens: IntArray,
        routes: dict[int, Routes] | None,
    ) -> None:
        self._layers, self._tokens, self._routes = layers, tokens, routes
        self._stacks = [(one, _adapters(one.bound)) for one in adapted]

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
        mlp = layer.mlp
        return dataclasses.replace(
            layer,
            qkv=self._unit(layer.qkv, first),
            o=self._unit(layer.o, first + 1),
            mlp=DenseMlp(
                self._unit(mlp.gate_up, first + 2), self._unit(mlp.down, first + 3), mlp.ops
            )
            if isinstance(mlp, DenseMlp)
            else dataclasses.replace(
                mlp,
                gate_up=self._experts(mlp.gate_up, first + 2),
                down=self._experts(mlp.down, first + 3),
                tokens=self._tokens,
                layer=index,
                routes=self._routes,
            ),
        )

    def _unit(self, plain: LinearUnit, index: int) -> LinearUnit:
        found = [(one, bound.linear(index)) for one, bound in self._stacks]
        return plain.adapt(
            tuple(AdaptedRows(one.rows, lora, one.accumulates) for one, lora in found if lora)
        )

    def _experts(self, plain: ExpertUnit, index: int) -> ExpertUnit:
        found = [(one, bound.experts(index)) for one, bound in self._stacks]
        return plain.adapt(
            tuple(AdaptedExperts(one.rows, lora, one.accumulates) for one, lora in found if lora)
        )


def bind_layer(
    config: DecoderConfig, layout: RowLayout, row: Tensor, index: int, split: KSplit, ops: Ops
) -> LayerWeights:
    """Return one frozen layer, from a row that may hold no other."""
    return _Binder(config, layout, row, None, split, ops).layer(index)


def _adapters(bound: DecoderWeights | AdapterWeights) -> AdapterWeights:
    if not isinstance(bound, AdapterWeights):
        raise TypeError("rows wear adapters, not whole models")
    return bound


@dataclass(frozen=True, slots=True)
class _Binder:
    config: DecoderConfig
    layout: RowLayout
    row: Tensor
    grad_row: Tensor | None
    split: KSplit
    ops: Ops

    def bind(self) -> DecoderWeights:
        embedding = f"{self.config.prefix}.embed_tokens.weight"
        head = head_unit(self.config)
        return DecoderWeights(
            embedding=self.layout.view(self.row, embedding),
            embedding_grad=self._grad([embedding]),
            layers=tuple(self.layer(index) for index in range(self.config.num_layers)),
            final_norm=self._norm(f"{self.config.prefix}.norm.weight"),
            head=dataclasses.replace(
                self._unit(head, [embedding] if self.config.is_tied else ["lm_head.weight"]),
                split=self.split,
            ),
            trains_input=self.grad_row is not None,
        )

    def layer(self, index: int) -> LayerWeights:
        """Return one layer."""
        prefix = f"{self.config.prefix}.layers.{index}"
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
            mlp=self._mlp(index, gate_up, down),
        )

    def _mlp(self, index: int, gate_up: LayerSpec, down: LayerSpec) -> DenseMlp | MoeMlp:
        moe = self.config.experts_of(index)
        if isinstance(gate_up, UnitSpec) and isinstance(down, UnitSpec):
            return DenseMlp(self._unit(gate_up), self._unit(down), self.ops)
        if moe is None or isinstance(gate_up, UnitSpec) or isinstance(down, UnitSpec):
            raise AssertionError("a layer has experts for both units or for none")
        router = router_name(self.config, index)
        return MoeMlp(
            router=LinearUnit(
                weight=self.layout.view(self.row, router),
                split=self.split,
                weight_grad=self._grad([router]),
            ),
            gate_up=self._experts(gate_up),
            down=self._experts(down),
            num_chosen=moe.num_chosen,
            normalises=moe.normalises,
        )

    def _experts(self, specs: ExpertSpecs) -> ExpertUnit:
        names = [f"{name}.weight" for unit in specs.experts for name in unit.names]
        shape = (len(specs.experts), sum(specs.first.num_outputs), specs.first.num_inputs)
        grad = self._grad(names)
        return ExpertUnit(
            weight=self.layout.fused(self.row, names).view(shape),
            split=self.split,
            weight_grad=None if grad is None else grad.view(shape),
        )

    def _norm(self, name: str) -> Norm:
        return Norm(self.layout.view(self.row, name), self._grad([name]))

    def _unit(self, spec: UnitSpec, weights: Sequence[str] | None = None) -> LinearUnit:
        weights = weights or [f"{name}.weight" for name in spec.names]
        biases = [f"{name}.bias" for name in spec.names]
        has_bias = biases[0] in self.layout
        return LinearUnit(
            weight=self.layout.fused(self.row, weights),
            split=self.split,
            bias=self.layout.fused(self.row, biases) if has_bias else None,
            weight_grad=self._grad(weights),
            bias_grad=self._grad(biases) if has_bias else None,
        )

    def _grad(self, names: Sequence[str]) -> Tensor | None:
        return None if self.grad_row is None else self.layout.fused(self.grad_row, names)
