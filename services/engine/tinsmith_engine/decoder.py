"""The packed decoder: forward and backward over the tokens of many sequences at once.

Rows are tokens, N of them, with no padding between sequences; only attention knows where one
sequence ends (`attention.py`). The forward leaves one tape entry per layer, the backward walks the
tape and adds parameter gradients to the run's row as it goes. There is no autograd graph: with one
Python call per operation instead of two, a small batch runs at the speed of its matrix products.

Trainer and sampler share this forward, which is why their log-probabilities agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tinsmith_engine.attention import AttentionBackend, PackedAttention
from tinsmith_engine.decoder_config import DecoderConfig, head_unit, layer_units
from tinsmith_engine.decoder_weights import DecoderWeights, LayerWeights, bind_weights
from tinsmith_engine.head import TokenLossFunction, run_head
from tinsmith_engine.linear import UnitSpec
from tinsmith_engine.models import RunTensors, Scores
from tinsmith_engine.ops import rms_norm, rms_norm_backward, rotate, swiglu, swiglu_backward
from tinsmith_engine.packing import MicroBatch
from tinsmith_engine.rows import RowLayout


@dataclass(frozen=True, slots=True)
class LayerTape:
    """What one layer's backward needs, [N, ...] each; `inverse_rms` are float32."""

    x: Tensor
    x_inverse_rms: Tensor
    x_normed: Tensor
    qkv_projected: Tensor | None
    qk: Tensor
    qk_inverse_rms: Tensor | None
    attended: Tensor
    o_projected: Tensor | None
    middle: Tensor
    middle_inverse_rms: Tensor
    middle_normed: Tensor
    gate_up: Tensor
    gate_up_projected: Tensor | None
    activated: Tensor
    down_projected: Tensor | None


class Decoder:
    """A Qwen3, Qwen2 or Llama model held as one row of weights."""

    def __init__(self, config: DecoderConfig, layout: RowLayout, base_row: Tensor) -> None:
        self.config = config
        self.full_layout = layout
        self.lora_units: Sequence[UnitSpec] = [
            unit for layer in range(config.num_layers) for unit in layer_units(config, layer)
        ] + [head_unit(config)]
        self._base_row = base_row
        self._frequencies = config.inverse_frequencies.to(base_row.device)

    def initial_row(self) -> Tensor:
        """Return the base model's weights, in the base model's dtype."""
        return self._base_row

    def bind(self, run: RunTensors | None) -> DecoderWeights:
        """Return the weights of a run, or of the base model."""
        return bind_weights(self.config, self.full_layout, self._base_row, run)

    def score(
        self,
        bound: DecoderWeights,
        micro_batch: MicroBatch,
        loss_function: TokenLossFunction,
        *,
        needs_gradient: bool,
    ) -> Scores:
        """Score a micro-batch; with `needs_gradient`, add to the run's gradient row."""
        attention = PackedAttention(micro_batch.buckets, keeps_graph=needs_gradient)
        tape: list[LayerTape] | None = [] if needs_gradient else None
        with torch.no_grad():
            cos, sin = self.rotary(micro_batch.positions_N)
            hidden = self.forward(bound, micro_batch.tokens_N, cos, sin, attention, tape)
            normed, inverse_rms = rms_norm(hidden, bound.final_norm.weight, self.config.rms_eps)
            found = run_head(
                bound.head,
                normed,
                micro_batch.targets_N,
                loss_function,
                needs_gradient=needs_gradient,
            )
            if tape is not None and found.dhidden is not None:
                norm = bound.final_norm
                dx = rms_norm_backward(found.dhidden, hidden, inverse_rms, norm.weight, norm.grad)
                self._backward(bound, micro_batch.tokens_N, cos, sin, attention, tape, dx)
        return Scores(found.logprobs_N, found.loss_N)

    def rotary(self, positions_N: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the rotary angles, [N, 1, D / 2] in the model's dtype."""
        angles = positions_N[:, None].float() * self._frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        scale, dtype = self.config.rope_scale, self._base_row.dtype
        return (cos * scale).to(dtype), (sin * scale).to(dtype)

    def forward(
        self,
        weights: DecoderWeights,
        tokens_N: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: AttentionBackend,
        tape: list[LayerTape] | None,
    ) -> Tensor:
        """Return the hidden states before the final norm, [N, H]; fills the tape if given one."""
        config = self.config
        x = weights.embedding.index_select(0, tokens_N)
        for index, layer in enumerate(weights.layers):
            x_normed, x_inverse_rms = rms_norm(x, layer.input_norm.weight, config.rms_eps)
            qkv, qkv_projected = layer.qkv.forward(x_normed)
            heads = qkv.view(len(x), -1, config.head_dim)
            qk, v = heads[:, : config.num_qk_heads], heads[:, config.num_qk_heads :]
            qk_normed, qk_inverse_rms = qk, None
            if layer.qk_norm is not None:
                qk_normed, qk_inverse_rms = rms_norm(qk, layer.qk_norm, config.rms_eps)
            rotated = rotate(qk_normed, cos, sin)
            q, k = rotated[:, : config.num_heads], rotated[:, config.num_heads :]
            attended = attention.forward(index, q, k, v).flatten(1)
            middle, o_projected = layer.o.forward(attended)
            middle += x
            middle_normed, middle_inverse_rms = rms_norm(
                middle, layer.post_norm.weight, config.rms_eps
            )
            gate_up, gate_up_projected = layer.gate_up.forward(middle_normed)
            activated = swiglu(gate_up)
            out, down_projected = layer.down.forward(activated)
            out += middle
            if tape is not None:
                tape.append(
                    LayerTape(
                        x=x,
                        x_inverse_rms=x_inverse_rms,
                        x_normed=x_normed,
                        qkv_projected=qkv_projected,
                        qk=qk,
                        qk_inverse_rms=qk_inverse_rms,
                        attended=attended,
                        o_projected=o_projected,
                        middle=middle,
                        middle_inverse_rms=middle_inverse_rms,
                        middle_normed=middle_normed,
                        gate_up=gate_up,
                        gate_up_projected=gate_up_projected,
                        activated=activated,
                        down_projected=down_projected,
                    )
                )
            x = out
        return x

    def _backward(
        self,
        weights: DecoderWeights,
        tokens_N: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: PackedAttention,
        tape: list[LayerTape],
        dx: Tensor,
    ) -> None:
        """Walk the tape from the last layer; `dx` [N, H] is the gradient of its output."""
        for index in reversed(range(len(weights.layers))):
            layer, saved = weights.layers[index], tape.pop()
            dactivated = _given(layer.down.backward(dx, saved.activated, saved.down_projected))
            dgate_up = swiglu_backward(dactivated, saved.gate_up)
            dnormed = _given(
                layer.gate_up.backward(dgate_up, saved.middle_normed, saved.gate_up_projected)
            )
            norm = layer.post_norm
            dx += rms_norm_backward(
                dnormed, saved.middle, saved.middle_inverse_rms, norm.weight, norm.grad
            )
            dattended = _given(layer.o.backward(dx, saved.attended, saved.o_projected))
            dqkv = self._attention_backward(layer, index, saved, dattended, cos, sin, attention)
            # Below the first layer of a frozen model there is nothing left to train.
            needs_dx = index > 0 or weights.trains_input
            dnormed_or_none = layer.qkv.backward(
                dqkv, saved.x_normed, saved.qkv_projected, needs_dx=needs_dx
            )
            if dnormed_or_none is None:
                return
            norm = layer.input_norm
            dx += rms_norm_backward(
                dnormed_or_none, saved.x, saved.x_inverse_rms, norm.weight, norm.grad
            )
        if weights.embedding_grad is not None:
            weights.embedding_grad.index_add_(0, tokens_N, dx.float())

    def _attention_backward(
        self,
        layer: LayerWeights,
        index: int,
        saved: LayerTape,
        dattended: Tensor,
        cos: Tensor,
        sin: Tensor,
        attention: PackedAttention,
    ) -> Tensor:
        """Return the gradient of the fused qkv output, [N, (Hq + 2 Hkv) D]."""
        config = self.config
        dout = dattended.view(len(dattended), config.num_heads, config.head_dim)
        dq, dk, dv = attention.backward(index, dout)
        dqk = rotate(torch.cat([dq, dk], dim=1), cos, -sin)
        if layer.qk_norm is not None and saved.qk_inverse_rms is not None:
            weight_grad = None
            if layer.qk_norm_grads is not None:
                weight_grad = torch.zeros_like(layer.qk_norm, dtype=torch.float32)
            dqk = rms_norm_backward(dqk, saved.qk, saved.qk_inverse_rms, layer.qk_norm, weight_grad)
            if layer.qk_norm_grads is not None and weight_grad is not None:
                layer.qk_norm_grads[0].add_(weight_grad[: config.num_heads].sum(0))
                layer.qk_norm_grads[1].add_(weight_grad[config.num_heads :].sum(0))
        return torch.cat([dqk, dv], dim=1).flatten(1)


def _given(gradient: Tensor | None) -> Tensor:
    if gradient is None:
        raise AssertionError("a unit that was asked for the input gradient returned none")
    return gradient
