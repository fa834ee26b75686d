"""The packed decoder: forward and backward over the tokens of many sequences at once.

Rows are tokens, N of them, with no padding between sequences; only attention knows where one
sequence ends (`attention.py`), and only adapters know which run a row belongs to (`linear.py`).
The forward saves the activations of each layer. The backward goes through them from the last and
adds parameter gradients to the slots of the runs. There is no autograd graph: with one Python
call per operation instead of two, a small batch runs at the speed of its matrix products.

Trainer and sampler share this forward, which is why their log-probabilities agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tinsmith_engine.arena.adapter_targets import LayerSpec, TargetSpec, target_specs
from tinsmith_engine.arena.slots import ParameterLayout
from tinsmith_engine.base.types import ImageInput
from tinsmith_engine.lora.lora import LoraTarget
from tinsmith_engine.model.attention import AttentionBackend, PackedAttention
from tinsmith_engine.model.decoder_config import DecoderConfig, head_target, layer_targets
from tinsmith_engine.model.decoder_weights import (
    AdapterWeights,
    DecoderWeights,
    LayerWeights,
    Norm,
    bind_adapters,
    bind_weights,
    use_adapters,
)
from tinsmith_engine.model.linear import Saved
from tinsmith_engine.model.lm_head import HeadScores, run_head
from tinsmith_engine.model.mlp import given
from tinsmith_engine.model.model_protocol import Pass, RunTensors
from tinsmith_engine.model.vision import VisionTower
from tinsmith_engine.packing.packing import SEGMENT_ROWS
from tinsmith_engine.products.ops import Ops, add_norm_gradient_, row_blocks
from tinsmith_engine.products.split_products import KSplit

Bound = DecoderWeights | AdapterWeights
"""The weights that all rows see, or what some rows use."""


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """What one layer's backward needs, [N, ...] each; `inverse_rms` are float32."""

    x: Tensor
    x_inverse_rms: Tensor
    x_normed: Tensor
    qkv_saved: Saved
    qk: Tensor
    qk_inverse_rms: Tensor | None
    attended: Tensor
    o_saved: Saved
    middle: Tensor
    middle_inverse_rms: Tensor
    middle_normed: Tensor
    mlp_saved: Any
    """What the MLP's own backward asks for."""


@dataclass(slots=True)
class SavedActivations:
    """What the backward needs: activations of each layer, or the input of each layer alone."""

    keeps_all: bool
    layers: list[LayerActivations] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)


class Decoder:
    """A Qwen3, Qwen3-MoE, Qwen2 or Llama model held as one row of weights.

    Args:
        config: Shapes and flags.
        layout: Where each weight lies in the row.
        base_parameters: The weights, in the dtype of the passes.
        split: How the sums of products are cut.
        ops: The elementwise operations.
        checkpoint_activations_over_tokens: Passes with more rows keep only the input of each layer,
            and compute the rest again in the backward: gradient checkpointing. It changes no bit.
        vision: Reads images, in a vision-language model.
    """

    groups_adapters = True

    def __init__(
        self,
        config: DecoderConfig,
        layout: ParameterLayout,
        base_parameters: Tensor,
        split: KSplit,
        ops: Ops,
        *,
        checkpoint_activations_over_tokens: int,
        vision: VisionTower | None = None,
    ) -> None:
        self.config = config
        self.trains_all = vision is None
        self.other_modules: Sequence[str] = vision.linear_modules if vision is not None else ()
        self.unreachable_experts: Sequence[str] = ()
        self.unreachable_layers: Mapping[str, str] = {}
        self._vision = vision
        self.full_layout = layout
        self.row_quantum = SEGMENT_ROWS
        self._specs: Sequence[LayerSpec] = [
            target for layer in range(config.num_layers) for target in layer_targets(config, layer)
        ] + [head_target(config)]
        self.lora_targets: Sequence[TargetSpec] = target_specs(self._specs)
        self._base_parameters = base_parameters
        self.split = split
        self.ops = ops
        self._checkpoint_activations_over_tokens = checkpoint_activations_over_tokens
        self._frequencies = config.inverse_frequencies.to(base_parameters.device)
        self._rope_axes = (
            None if config.rope_axes is None else config.rope_axes.to(base_parameters.device)
        )

    def first_layers(self) -> Decoder:
        """Return a decoder of the first layers, as few as show every kind, over the same weights.

        It computes nonsense, and rounds it as the whole decoder does.
        """
        layers = range(self.config.num_layers)
        has_experts = [self.config.experts_of(layer) is not None for layer in layers]
        num_layers = 1 + max(has_experts.index(kind) for kind in set(has_experts))
        return Decoder(
            dataclasses.replace(self.config, num_layers=num_layers),
            self.full_layout,
            self._base_parameters,
            self.split,
            self.ops,
            checkpoint_activations_over_tokens=self._checkpoint_activations_over_tokens,
            vision=self._vision,
        )

    def initial_parameters(self) -> Tensor:
        """Return the base model's weights, in the base model's dtype."""
        return self._base_parameters

    def bind(self, run: RunTensors | None) -> Bound:
        """Return the weights of a full run or of the base model, or the adapters of a group."""
        if run is not None and not run.is_full:
            return bind_adapters(self._specs, self._base_parameters.dtype, run)
        return bind_weights(
            self.config, self.full_layout, self._base_parameters, run, self.split, self.ops
        )

    def head_adapter(self, bound: Bound, index: int) -> LoraTarget | None:
        """Return the adapter of the unembedding of one run of a group, or None."""
        target = bound.linear(-1) if isinstance(bound, AdapterWeights) else None
        return None if target is None else target.run(index)

    def score(self, one: Pass[Bound], *, needs_gradient: bool) -> list[HeadScores]:
        """Score the heads of a pass; with `needs_gradient`, also add to the gradient rows."""
        if not isinstance(one.weights, DecoderWeights):
            raise TypeError("a pass needs the weights of the base model or of a full run")
        rows = one.rows
        weights = use_adapters(one.weights, one.adapted, rows.token_rows, one.routes)
        keeps_all = len(rows) <= self._checkpoint_activations_over_tokens
        activations = SavedActivations(keeps_all=keeps_all) if needs_gradient else None
        attention = PackedAttention(rows, self.split, keeps_graph=needs_gradient and keeps_all)
        with torch.no_grad():
            cos, sin = self.rotary(rows.positions_N)
            embedded = self.embed(weights, rows.tokens_N, one.images)
            hidden = self.forward(weights, embedded, cos, sin, attention, activations)
            norm = weights.final_norm
            normed, inverse_rms = self.ops.rms_norm(hidden, norm.weight, self.config.rms_eps)
            scores, dnormed = run_head(
                weights.head, normed, one.heads, needs_gradient=needs_gradient
            )
            if activations is not None and dnormed is not None:
                dx = self._norm_backward(norm, dnormed, hidden, inverse_rms, None)
                if not keeps_all:
                    attention = PackedAttention(rows, self.split, keeps_graph=True)
                self._backward(weights, rows.tokens_N, cos, sin, attention, activations, dx)
        return scores

    def embed(
        self, weights: DecoderWeights, tokens_N: Tensor, images: Sequence[tuple[int, ImageInput]]
    ) -> Tensor:
        """Return embeddings [N, H]; images, each given with its first row, bring their own."""
        embedded = weights.embedding.index_select(0, tokens_N)
        for row, image in images:
            if self._vision is None:
                raise TypeError("the model reads no images")
            embedded[row : row + image.num_tokens] = self._vision.features(image)
        return embedded

    def rotary(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary angles, [N, 1, D / 2] in the model's dtype.

        Positions are [N], or [3, N] where a pass holds images.
        """
        by_frequency = positions_N[:, None].float()
        if positions_N.dim() == 2:
            by_frequency = positions_N.float()[self._rope_axes].t()
        angles = by_frequency * self._frequencies
        cos, sin = torch.empty_like(angles), torch.empty_like(angles)
        for rows in row_blocks(*angles.shape, torch.get_num_threads()):
            torch.cos(angles[rows], out=cos[rows])
            torch.sin(angles[rows], out=sin[rows])
        scale, dtype = self.config.rope_scale, self._base_parameters.dtype
        return (cos * scale).to(dtype)[:, None], (sin * scale).to(dtype)[:, None]

    def forward(
        self,
        weights: DecoderWeights,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionBackend,
        activations: SavedActivations | None,
    ) -> Tensor:
        """Return the hidden states before the final norm, [N, H], for embedded tokens x [N, H]."""
        for index, layer in enumerate(weights.layers):
            before = x
            x, saved = self._layer(layer, index, x, cos, sin, attention)
            if activations is not None and activations.keeps_all:
                activations.layers.append(saved)
            elif activations is not None:
                activations.inputs.append(before)
        return x

    def _layer(
        self,
        layer: LayerWeights,
        index: int,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionBackend,
    ) -> tuple[Tensor, LayerActivations]:
        config = self.config
        ops = self.ops
        x_normed, x_inverse_rms = ops.rms_norm(x, layer.input_norm.weight, config.rms_eps)
        qkv, qkv_saved = layer.qkv.forward(x_normed)
        heads = qkv.view(len(x), -1, config.head_dim)
        qk, v = heads[:, : config.num_qk_heads], heads[:, config.num_qk_heads :]
        qk_inverse_rms = None
        if layer.qk_norm is None:
            rotated = ops.rotate(qk, cos, sin)
        else:
            rotated, qk_inverse_rms = ops.norm_rotate(qk, layer.qk_norm, config.rms_eps, cos, sin)
        q, k = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
        attended = attention.forward(index, q, k, v).flatten(1)
        projected, o_saved = layer.o.forward(attended)
        middle, middle_normed, middle_inverse_rms = ops.add_rms_norm(
            projected, x, layer.post_norm.weight, config.rms_eps
        )
        out, mlp_saved = layer.mlp.forward(middle_normed)
        out += middle
        return out, LayerActivations(
            x=x,
            x_inverse_rms=x_inverse_rms,
            x_normed=x_normed,
            qkv_saved=qkv_saved,
            qk=qk,
            qk_inverse_rms=qk_inverse_rms,
            attended=attended,
            o_saved=o_saved,
            middle=middle,
            middle_inverse_rms=middle_inverse_rms,
            middle_normed=middle_normed,
            mlp_saved=mlp_saved,
        )

    def _backward(
        self,
        weights: DecoderWeights,
        tokens_N: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: PackedAttention,
        activations: SavedActivations,
        dx: Tensor,
    ) -> None:
        """Go back from the last layer; `dx` [N, H] is the gradient of its output."""
        for index in reversed(range(len(weights.layers))):
            layer = weights.layers[index]
            if activations.keeps_all:
                saved = activations.layers.pop()
            else:
                _, saved = self._layer(layer, index, activations.inputs.pop(), cos, sin, attention)
            dnormed = layer.mlp.backward(dx, saved.middle_normed, saved.mlp_saved)
            dx = self._norm_backward(
                layer.post_norm, dnormed, saved.middle, saved.middle_inverse_rms, dx
            )
            dattended = given(layer.o.backward(dx, saved.attended, saved.o_saved))
            dqkv = self._attention_backward(layer, index, saved, dattended, cos, sin, attention)
            # Below the first layer of a frozen model there is nothing left to train.
            needs_dx = index > 0 or weights.trains_input
            dnormed_or_none = layer.qkv.backward(
                dqkv, saved.x_normed, saved.qkv_saved, needs_dx=needs_dx
            )
            if dnormed_or_none is None:
                return
            dx = self._norm_backward(
                layer.input_norm, dnormed_or_none, saved.x, saved.x_inverse_rms, dx
            )
        if weights.embedding_grad is not None:
            weights.embedding_grad.index_add_(0, tokens_N, dx.float())

    def _attention_backward(
        self,
        layer: LayerWeights,
        index: int,
        saved: LayerActivations,
        dattended: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: PackedAttention,
    ) -> Tensor:
        """Return the gradient of the fused qkv output, [N, (Hq + 2 Hkv) D]."""
        config = self.config
        dout = dattended.view(len(dattended), config.num_heads, config.head_dim)
        dq, dk, dv = attention.backward(index, dout)
        drotated = torch.cat([dq, dk], dim=1)
        if layer.qk_norm is None or saved.qk_inverse_rms is None:
            dqk = self.ops.rotate(drotated, cos, -sin)
        else:
            self._add_qk_norm_gradients(layer, saved, drotated, cos, sin)
            dqk = self.ops.norm_rotate_backward(
                drotated, saved.qk, saved.qk_inverse_rms, layer.qk_norm, cos, sin
            )
        return torch.cat([dqk, dv], dim=1).flatten(1)

    def _add_qk_norm_gradients(
        self,
        layer: LayerWeights,
        saved: LayerActivations,
        drotated: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> None:
        """Add the gradients of the norms of q and k, where they are trained."""
        if layer.qk_norm_grads is None or layer.qk_norm is None or saved.qk_inverse_rms is None:
            return
        grad = torch.zeros_like(layer.qk_norm, dtype=torch.float32)
        dnormed = self.ops.rotate(drotated, cos, -sin)
        add_norm_gradient_(grad, dnormed, saved.qk, saved.qk_inverse_rms)
        layer.qk_norm_grads[0].add_(grad[: self.config.num_heads].sum(0))
        layer.qk_norm_grads[1].add_(grad[self.config.num_heads :].sum(0))

    def _norm_backward(
        self, norm: Norm, dy: Tensor, x: Tensor, inverse_rms: Tensor, residual: Tensor | None
    ) -> Tensor:
        """Return the gradient for a norm's input plus `residual`; add that of a trained weight."""
        if norm.grad is not None:
            add_norm_gradient_(norm.grad, dy, x, inverse_rms)
        return self.ops.rms_norm_backward(dy, x, inverse_rms, norm.weight, residual)
