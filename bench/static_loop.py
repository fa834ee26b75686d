"""The strongest plain rival of our decoding: a loop over a preallocated cache, in a page of torch.

No transformers in the loop, no batching of requests, no adapters, no log-probabilities: weights of
a Qwen2, Qwen3 or Llama checkpoint, one greedy token after another for sequences of one length.
Projections that read the same input are one product, and names are looked up before the loop.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor


class StaticLoop:
    """A model and the cache of its sequences."""

    def __init__(self, model_dir: Path, *, num_sequences: int, max_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._config: Any = model.config
        config = self._config
        self._head_dim = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        shape = (num_sequences, config.num_key_value_heads, max_tokens, self._head_dim)
        self._keys = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        self._values = [torch.zeros(shape) for _ in range(config.num_hidden_layers)]
        position = torch.arange(max_tokens)[:, None]
        half = torch.arange(0, self._head_dim, 2) / self._head_dim
        angles = position / config.rope_parameters["rope_theta"] ** half
        self._cos, self._sin = angles.cos(), angles.sin()
        weights: dict[str, Tensor] = dict(model.state_dict())
        self._embedding, self._norm = (
            weights[f"model.{name}.weight"] for name in ("embed_tokens", "norm")
        )
        self._head = weights["lm_head.weight"]
        self._layers = [
            _Layer.of(weights, f"model.layers.{layer}.")
            for layer in range(config.num_hidden_layers)
        ]

    @torch.inference_mode()
    def generate(self, prompts_ST: Tensor, num_tokens: int) -> Tensor:
        """Return the greedy continuation [S, num_tokens] of prompts of one length [S, T]."""
        tokens = self._step(prompts_ST, 0)
        found = [tokens]
        for index in range(1, num_tokens):
            tokens = self._step(tokens, prompts_ST.shape[1] + index - 1)
            found.append(tokens)
        return torch.cat(found, dim=1)

    def _step(self, tokens_ST: Tensor, start: int) -> Tensor:
        eps, head_dim = self._config.rms_norm_eps, self._head_dim
        num_heads, num_keys = self._config.num_attention_heads, self._config.num_key_value_heads
        stop = start + tokens_ST.shape[1]
        cos, sin = self._cos[start:stop], self._sin[start:stop]
        x = F.embedding(tokens_ST, self._embedding)
        for layer, keys, values in zip(self._layers, self._keys, self._values, strict=True):
            normed = F.rms_norm(x, x.shape[-1:], layer.input_norm, eps)
            heads = F.linear(normed, *layer.qkv).view(*tokens_ST.shape, -1, head_dim)
            q, k, v = heads.transpose(1, 2).split((num_heads, num_keys, num_keys), dim=1)  # type: ignore[no-untyped-call]
            if layer.qk_norms is not None:
                q = F.rms_norm(q, (head_dim,), layer.qk_norms[0], eps)
                k = F.rms_norm(k, (head_dim,), layer.qk_norms[1], eps)
            keys[:, :, start:stop], values[:, :, start:stop] = _rotate(k, cos, sin), v
            attended = F.scaled_dot_product_attention(
                _rotate(q, cos, sin),
                keys[:, :, :stop],
                values[:, :, :stop],
                is_causal=start == 0,
                enable_gqa=True,
            )
            x = x + F.linear(attended.transpose(1, 2).flatten(2), layer.o)
            normed = F.rms_norm(x, x.shape[-1:], layer.post_norm, eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        last = F.rms_norm(x[:, -1:], x.shape[-1:], self._norm, eps)
        return F.linear(last, self._head).argmax(-1)


def generate(model: Any, prompts_ST: Tensor, num_tokens: int) -> None:
    """Take as many likeliest tokens with a model's own `generate`."""
    with torch.inference_mode():
        model.generate(
            input_ids=prompts_ST,
            attention_mask=torch.ones_like(prompts_ST),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )


class _Layer(NamedTuple):
    """The weights of a layer."""

    input_norm: Tensor
    qkv: tuple[Tensor, Tensor | None]
    """Weight and bias."""
    qk_norms: tuple[Tensor, Tensor] | None
    o: Tensor
    post_norm: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def of(cls, weights: dict[str, Tensor], prefix: str) -> _Layer:
        """Return a layer, its projections of one input side by side."""

        def weight(name: str, kind: str = "weight") -> Tensor:
            return weights[f"{prefix}{name}.{kind}"]

        projections = [f"self_attn.{name}_proj" for name in "qkv"]
        has_bias = f"{prefix}{projections[0]}.bias" in weights
        bias = torch.cat([weight(name, "bias") for name in projections]) if has_bias else None
        has_norms = f"{prefix}self_attn.q_norm.weight" in weights
        return cls(
            input_norm=weight("input_layernorm"),
            qkv=(torch.cat([weight(name) for name in projections]), bias),
            qk_norms=(
                (weight("self_attn.q_norm"), weight("self_attn.k_norm")) if has_norms else None
            ),
            o=weight("self_attn.o_proj"),
            post_norm=weight("post_attention_layernorm"),
            gate_up=torch.cat([weight("mlp.gate_proj"), weight("mlp.up_proj")]),
            down=weight("mlp.down_proj"),
        )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
