"""The decoder's weights as views of a row, and the adapters that rows of a pass use.

The base model is one row of the full layout in its own dtype. Adapter runs read that row and use
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

from tinsmith_engine.arena.adapter_targets import ExpertSpecs, LayerSpec, TargetSpec
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.base.types import IntArray
from tinsmith_engine.lora.expert_lora import ExpertLora
from tinsmith_engine.lora.lora import LoraTarget
from tinsmith_engine.model.decoder_config import (
    DecoderConfig,
    head_target,
    layer_targets,
    router_name,
)
from tinsmith_engine.model.experts import AdaptedExperts, ExpertTarget, MoeMlp
from tinsmith_engine.model.linear import AdaptedRows, LinearTarget
from tinsmith_engine.model.mlp import DenseMlp
from tinsmith_engine.model.model_protocol import BoundRows, RunTensors
from tinsmith_engine.packing.moe_routing import Routes
from tinsmith_engine.products.ops import EAGER, Ops
from tinsmith_engine.products.split_products import KSplit

LAYER_TARGETS = 4
"""Units of a layer, in the order of `decoder_config.layer_targets`."""


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm's weight, and its float32 gradient view if it is trained."""

    weight: Tensor
    grad: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One block."""

    input_norm: Norm
    qkv: LinearTarget
    qk_norm: Tensor | None
    """q and k norm weights, repeated for each head: [heads of q and k, D]."""
    qk_norm_grads: tuple[Tensor, Tensor] | None
    """Views for q and for k, [D] each."""
    o: LinearTarget
    post_norm: Norm
    mlp: DenseMlp | MoeMlp


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """Everything that one pass reads and, with gradient views, adds to."""

    embedding: Tensor
    embedding_grad: Tensor | None
    layers: Sequence[LayerWeights]
    final_norm: Norm
    head: LinearTarget
    trains_input: bool
    """Whether the gradient must reach the embedding."""

    def with_layers(self, layers: Sequence[LayerWeights]) -> DecoderWeights:
        """Return the weights with other layers."""
        return dataclasses.replace(self, layers=layers)


@dataclass(frozen=True, slots=True)
class AdapterWeights:
    """The adapters of a group of runs, by target: those of each layer in turn, then the head's."""

    targets: tuple[LoraTarget | ExpertLora | None, ...]

    def linear(self, index: int) -> LoraTarget | None:
        """Return the adapters of a target that is not one of experts."""
        target = self.targets[index]
        if isinstance(target, ExpertLora):
            raise TypeError(f"unit {index} is one of experts")
        return target

    def experts(self, index: int) -> ExpertLora | None:
        """Return the adapters of a target of experts."""
        target = self.targets[index]
        if isinstance(target, LoraTarget):
            raise TypeError(f"unit {index} is not one of experts")
        return target


def bind_weights(
    config: DecoderConfig,
    layout: ParameterLayout,
    base_parameters: Tensor,
    run: RunTensors | None,
    split: KSplit,
    ops: Ops = EAGER,
) -> DecoderWeights:
    """Return the weights of a full-parameter run, or of the base model."""
    flat, flat_grad = base_parameters, None
    if run is not None:
        flat, flat_grad = run.theta_P.to(base_parameters.dtype), run.grad_P
    return _Binder(config, layout, flat, flat_grad, split, ops).bind()


def bind_adapters(
    specs: Sequence[LayerSpec], dtype: torch.dtype, run: RunTensors
) -> AdapterWeights:
    """Return the adapters of a run, or of an adapter group of runs, in the dtype of the passes."""
    width = run.layout.width
    theta_RP = run.theta_P.view(-1, width) if run.theta_P.dim() == 1 else run.theta_P
    theta_RP = theta_RP.to(dtype)
    grad_RP = run.grad_P
    if grad_RP is not None and grad_RP.dim() == 1:
        grad_RP = grad_RP[None]
    # See `lora`: a batch of one is another kernel then.
    is_doubled = len(theta_RP) == 1 and dtype != torch.float32 and theta_RP.device.type == "cpu"
    dense_RP = theta_RP.repeat(2, 1) if is_doubled else theta_RP
    return AdapterWeights(
        tuple(
            ExpertLora.of(spec, run.layout, theta_RP, grad_RP, run.scale)
            if isinstance(spec, ExpertSpecs)
            else LoraTarget.of(
                spec, run.layout, dense_RP, grad_RP, run.scale, is_doubled=is_doubled
            )
            for spec in specs
        )
    )


def use_adapters(
    weights: DecoderWeights,
    adapted: Sequence[BoundRows[DecoderWeights | AdapterWeights]],
    tokens: IntArray,
    routes: dict[int, Routes] | None = None,
) -> DecoderWeights:
    """Return weights whose layers apply adapters to some rows of a pass.

    The head is left as it is: its chunks have rows of their own (`lm_head.py`).

    Args:
        weights: What all rows see.
        adapted: What some rows use.
        tokens: The rows that are tokens; others are filling, which no expert needs to see.
        routes: Where to leave which experts the tokens went to, by layer.
    """
    # Layers that are not in memory, a sharded base's, are dense, and are not read for nothing.
    in_memory = weights.layers if isinstance(weights.layers, tuple) else ()
    if not adapted and not any(isinstance(layer.mlp, MoeMlp) for layer in in_memory):
        return weights
    used: Sequence[LayerWeights] = _WornLayers(weights.layers, adapted, tokens, routes)
    if isinstance(weights.layers, tuple):
        used = tuple(used)
    return weights.with_layers(used)


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
        layer, first = self._layers[index], index * LAYER_TARGETS
        mlp = layer.mlp
        return dataclasses.replace(
            layer,
            qkv=self._target(layer.qkv, first),
            o=self._target(layer.o, first + 1),
            mlp=DenseMlp(
                self._target(mlp.gate_up, first + 2), self._target(mlp.down, first + 3), mlp.ops
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

    def _target(self, plain: LinearTarget, index: int) -> LinearTarget:
        found = [(one, bound.linear(index)) for one, bound in self._stacks]
        return plain.adapt(
            tuple(AdaptedRows(one.rows, lora, one.accumulates) for one, lora in found if lora)
        )

    def _experts(self, plain: ExpertTarget, index: int) -> ExpertTarget:
        found = [(one, bound.experts(index)) for one, bound in self._stacks]
        return plain.adapt(
            tuple(AdaptedExperts(one.rows, lora, one.accumulates) for one, lora in found if lora)
        )


def bind_layer(
    config: DecoderConfig,
    layout: ParameterLayout,
    flat: Tensor,
    index: int,
    split: KSplit,
    ops: Ops,
) -> LayerWeights:
    """Return one frozen layer, from a row that may hold no other."""
    return _Binder(config, layout, flat, None, split, ops).layer(index)


def _adapters(bound: DecoderWeights | AdapterWeights) -> AdapterWeights:
    if not isinstance(bound, AdapterWeights):
        raise TypeError("rows wear adapters, not whole models")
    return bound


@dataclass(frozen=True, slots=True)
class _Binder:
    config: DecoderConfig
    layout: ParameterLayout
    flat: Tensor
    flat_grad: Tensor | None
    split: KSplit
    ops: Ops

    def bind(self) -> DecoderWeights:
        embedding = f"{self.config.prefix}.embed_tokens.weight"
        head = head_target(self.config)
        return DecoderWeights(
            embedding=self.layout.view(self.flat, embedding),
            embedding_grad=self._grad([embedding]),
            layers=tuple(self.layer(index) for index in range(self.config.num_layers)),
            final_norm=self._norm(f"{self.config.prefix}.norm.weight"),
            head=dataclasses.replace(
                self._target(head, [embedding] if self.config.is_tied else ["lm_head.weight"]),
                split=self.split,
            ),
            trains_input=self.flat_grad is not None,
        )

    def layer(self, index: int) -> LayerWeights:
        """Return one layer."""
        prefix = f"{self.config.prefix}.layers.{index}"
        qkv, o, gate_up, down = layer_targets(self.config, index)
        qk_norm, qk_norm_grads = None, None
        if self.config.has_qk_norm:
            names = [f"{prefix}.self_attn.{name}_norm.weight" for name in "qk"]
            q, k = (self.layout.view(self.flat, name) for name in names)
            heads = (self.config.num_heads, self.config.num_kv_heads)
            qk_norm = torch.cat([q.expand(heads[0], -1), k.expand(heads[1], -1)])
            if self.flat_grad is not None:
                q_grad, k_grad = (self.layout.view(self.flat_grad, name) for name in names)
                qk_norm_grads = (q_grad, k_grad)
        return LayerWeights(
            input_norm=self._norm(f"{prefix}.input_layernorm.weight"),
            qkv=self._target(qkv),
            qk_norm=qk_norm,
            qk_norm_grads=qk_norm_grads,
            o=self._target(o),
            post_norm=self._norm(f"{prefix}.post_attention_layernorm.weight"),
            mlp=self._mlp(index, gate_up, down),
        )

    def _mlp(self, index: int, gate_up: LayerSpec, down: LayerSpec) -> DenseMlp | MoeMlp:
        moe = self.config.experts_of(index)
        if isinstance(gate_up, TargetSpec) and isinstance(down, TargetSpec):
            return DenseMlp(self._target(gate_up), self._target(down), self.ops)
        if moe is None or isinstance(gate_up, TargetSpec) or isinstance(down, TargetSpec):
            raise AssertionError("a layer has experts for both units or for none")
        router = router_name(self.config, index)
        return MoeMlp(
            router=LinearTarget(
                weight=self.layout.view(self.flat, router),
                split=self.split,
                weight_grad=self._grad([router]),
            ),
            gate_up=self._experts(gate_up),
            down=self._experts(down),
            num_chosen=moe.num_chosen,
            normalises=moe.normalises,
        )

    def _experts(self, specs: ExpertSpecs) -> ExpertTarget:
        names = [f"{name}.weight" for target in specs.experts for name in target.names]
        shape = (len(specs.experts), sum(specs.first.num_outputs), specs.first.num_inputs)
        grad = self._grad(names)
        return ExpertTarget(
            weight=self.layout.fused(self.flat, names).view(shape),
            split=self.split,
            weight_grad=None if grad is None else grad.view(shape),
        )

    def _norm(self, name: str) -> Norm:
        return Norm(self.layout.view(self.flat, name), self._grad([name]))

    def _target(self, spec: TargetSpec, weights: Sequence[str] | None = None) -> LinearTarget:
        weights = weights or [f"{name}.weight" for name in spec.names]
        biases = [f"{name}.bias" for name in spec.names]
        has_bias = biases[0] in self.layout
        return LinearTarget(
            weight=self.layout.fused(self.flat, weights),
            split=self.split,
            bias=self.layout.fused(self.flat, biases) if has_bias else None,
            weight_grad=self._grad(weights),
            bias_grad=self._grad(biases) if has_bias else None,
        )

    def _grad(self, names: Sequence[str]) -> Tensor | None:
        return None if self.flat_grad is None else self.layout.fused(self.flat_grad, names)
