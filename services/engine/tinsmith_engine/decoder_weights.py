"""The decoder's weights as views of a row, plus a run's adapter, ready for a pass.

The base model is one row of the full layout in its own dtype. An adapter run reads that row and its
own adapter row; a full-parameter run brings a row that replaces it. Rows are float32 masters: where
the base model is bfloat16, binding makes the copy that the pass computes with, while gradients are
still added to the float32 row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_engine.decoder_config import DecoderConfig, head_unit, layer_units
from tinsmith_engine.linear import LinearUnit, LoraUnit, UnitSpec
from tinsmith_engine.models import RunTensors
from tinsmith_engine.rows import RowLayout


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
    layers: tuple[LayerWeights, ...]
    final_norm: Norm
    head: LinearUnit
    trains_input: bool
    """Whether the gradient must reach the embedding."""


def bind_weights(
    config: DecoderConfig, base_layout: RowLayout, base_row: Tensor, run: RunTensors | None
) -> DecoderWeights:
    """Return the weights of a run on the base model, or of the base model alone."""
    adapter = None
    row, grad_row = base_row, None
    if run is not None and run.is_full:
        row, grad_row = run.theta_P.to(base_row.dtype), run.grad_P
    elif run is not None:
        adapter = RunTensors(
            run.layout, run.theta_P.to(base_row.dtype), run.grad_P, run.scale, is_full=False
        )
    return _Binder(config, base_layout, row, grad_row, adapter).bind()


@dataclass(frozen=True, slots=True)
class _Binder:
    config: DecoderConfig
    layout: RowLayout
    row: Tensor
    grad_row: Tensor | None
    adapter: RunTensors | None

    def bind(self) -> DecoderWeights:
        embedding = "model.embed_tokens.weight"
        head = head_unit(self.config)
        return DecoderWeights(
            embedding=self.layout.view(self.row, embedding),
            embedding_grad=self._grad([embedding]),
            layers=tuple(self._layer(index) for index in range(self.config.num_layers)),
            final_norm=self._norm("model.norm.weight"),
            head=self._unit(head, [embedding] if self.config.is_tied else ["lm_head.weight"]),
            trains_input=self.grad_row is not None,
        )

    def _layer(self, index: int) -> LayerWeights:
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
        lora = None
        if self.adapter is not None:
            lora = LoraUnit.of(
                spec,
                self.adapter.layout,
                self.adapter.theta_P,
                self.adapter.grad_P,
                self.adapter.scale,
            )
        return LinearUnit(
            weight=self.layout.fused(self.row, weights),
            bias=self.layout.fused(self.row, biases) if has_bias else None,
            weight_grad=self._grad(weights),
            bias_grad=self._grad(biases) if has_bias else None,
            lora=lora,
        )

    def _grad(self, names: Sequence[str]) -> Tensor | None:
        return None if self.grad_row is None else self.layout.fused(self.grad_row, names)
