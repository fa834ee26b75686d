"""The strongest plain rival of our decoding: a loop over a preallocated cache, in a page of torch.

No transformers in the loop, no batching of requests, no adapters, no log-probabilities: weights of
a Qwen2, Qwen3 or Llama checkpoint, one greedy token after another for sequences of one length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every PyTorch reader expects
from torch import Tensor


class StaticLoop:
    """A model and the cache of its sequences."""

    def __init__(self, model_dir: Path, *, num_sequences: int, max_tokens: int) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        self._config: Any = model.config
        self._weights: dict[str, Tensor] = dict(model.state_dict())
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
        weights, eps = self._weights, self._config.rms_norm_eps
        stop = start + tokens_ST.shape[1]
        cos, sin = self._cos[start:stop], self._sin[start:stop]
        x = F.embedding(tokens_ST, weights["model.embed_tokens.weight"])
        for layer in range(self._config.num_hidden_layers):
            prefix = f"model.layers.{layer}."
            normed = F.rms_norm(x, x.shape[-1:], weights[prefix + "input_layernorm.weight"], eps)
            q, k, v = (self._heads(normed, prefix + f"self_attn.{name}_proj") for name in "qkv")
            if prefix + "self_attn.q_norm.weight" in weights:
                q, k = (
                    F.rms_norm(t, t.shape[-1:], weights[prefix + f"self_attn.{n}_norm.weight"], eps)
                    for t, n in ((q, "q"), (k, "k"))
                )
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
            self._keys[layer][:, :, start:stop], self._values[layer][:, :, start:stop] = k, v
            attended = F.scaled_dot_product_attention(
                q,
                self._keys[layer][:, :, :stop],
                self._values[layer][:, :, :stop],
                is_causal=start == 0,
                enable_gqa=True,
            )
            x = x + self._linear(attended.transpose(1, 2).flatten(2), prefix + "self_attn.o_proj")
            normed = F.rms_norm(
                x, x.shape[-1:], weights[prefix + "post_attention_layernorm.weight"], eps
            )
            gate, up = (self._linear(normed, prefix + f"mlp.{n}_proj") for n in ("gate", "up"))
            x = x + self._linear(F.silu(gate) * up, prefix + "mlp.down_proj")
        last = F.rms_norm(x[:, -1:], x.shape[-1:], weights["model.norm.weight"], eps)
        return self._linear(last, "lm_head").argmax(-1)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self._weights[name + ".weight"], self._weights.get(name + ".bias"))

    def _heads(self, x: Tensor, name: str) -> Tensor:
        return self._linear(x, name).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)  # type: ignore[no-untyped-call,no-any-return]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
