"""Which models the packed forward can run, and their shapes.

Qwen3, Qwen2 and Llama are one decoder with flags: biases on some projections, norms on q and k,
tied embeddings. Anything that this module does not recognise in full (sliding windows, rotary
schemes whose frequencies depend on the sequence length, another activation) is left to the fallback
rather than run approximately.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith_engine.rows import RowLayout
from tinsmith_engine.units import UnitSpec

_FAMILIES = ("qwen3", "qwen2", "llama")
_STATIC_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes and flags of a decoder of the Llama kind."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_positions: int
    is_tied: bool
    has_qk_norm: bool
    inverse_frequencies: Tensor
    """Rotary angles per position, float32 [D / 2]."""
    rope_scale: float
    """Multiplies cos and sin."""

    @property
    def num_qk_heads(self) -> int:
        """Heads that are normed and rotated: q and k."""
        return self.num_heads + self.num_kv_heads


def decoder_config(hf_config: Any) -> DecoderConfig | None:
    """Return the decoder for a transformers configuration, or None if the fallback must run it."""
    if hf_config.model_type not in _FAMILIES or hf_config.hidden_act != "silu":
        return None
    layer_types = getattr(hf_config, "layer_types", None) or ()
    if any(kind != "full_attention" for kind in layer_types):
        return None
    if getattr(hf_config, "use_sliding_window", False):
        return None
    head_dim = getattr(hf_config, "head_dim", None) or (
        hf_config.hidden_size // hf_config.num_attention_heads
    )
    rope = _rope(hf_config, head_dim)
    if rope is None:
        return None
    return DecoderConfig(
        family=hf_config.model_type,
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads or hf_config.num_attention_heads,
        head_dim=head_dim,
        rms_eps=hf_config.rms_norm_eps,
        max_positions=hf_config.max_position_embeddings,
        is_tied=bool(hf_config.tie_word_embeddings),
        has_qk_norm=hf_config.model_type == "qwen3",
        inverse_frequencies=rope[0],
        rope_scale=rope[1],
    )


def _rope(hf_config: Any, head_dim: int) -> tuple[Tensor, float] | None:
    # transformers 5 keeps all of it in rope_parameters; older configurations have rope_theta
    # beside a rope_scaling that names the scheme as `rope_type`, or `type` before that.
    parameters = dict(getattr(hf_config, "rope_parameters", None) or {})
    scaling = dict(getattr(hf_config, "rope_scaling", None) or {})
    merged = {**scaling, **parameters}
    theta = merged.get("rope_theta") or getattr(hf_config, "rope_theta", None) or 10_000.0
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if kind not in _STATIC_ROPE_TYPES or merged.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](hf_config, torch.device("cpu"))
        return frequencies.float(), float(scale)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (float(theta) ** exponents), 1.0


def layer_units(config: DecoderConfig, layer: int) -> tuple[UnitSpec, ...]:
    """Return the four fused linear layers of a block: qkv, o, gate and up, down."""
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return (
        UnitSpec(
            tuple(f"{attention}.{name}_proj" for name in "qkv"), hidden, (q, kv, kv), "attention"
        ),
        UnitSpec((f"{attention}.o_proj",), q, (hidden,), "attention"),
        UnitSpec((f"{mlp}.gate_proj", f"{mlp}.up_proj"), hidden, (inner, inner), "mlp"),
        UnitSpec((f"{mlp}.down_proj",), inner, (hidden,), "mlp"),
    )


def head_unit(config: DecoderConfig) -> UnitSpec:
    """Return the unembedding."""
    return UnitSpec(("lm_head",), config.hidden_size, (config.vocab_size,), "unembedding")


def full_layout(config: DecoderConfig, stored_names: Collection[str]) -> RowLayout:
    """Return the layout of all weights, under their Hugging Face names.

    `stored_names` are the tensors of the checkpoint: biases exist where it has them.
    """
    hidden = (config.hidden_size,)
    tensors: list[tuple[str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    ]

    def add_unit(unit: UnitSpec) -> None:
        sizes = list(zip(unit.names, unit.num_outputs, strict=True))
        tensors.extend((f"{name}.weight", (size, unit.num_inputs)) for name, size in sizes)
        if f"{unit.names[0]}.bias" in stored_names:
            tensors.extend((f"{name}.bias", (size,)) for name, size in sizes)

    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        qkv, o, gate_up, down = layer_units(config, layer)
        tensors.append((f"{prefix}.input_layernorm.weight", hidden))
        add_unit(qkv)
        if config.has_qk_norm:
            tensors.append((f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)))
            tensors.append((f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)))
        add_unit(o)
        tensors.append((f"{prefix}.post_attention_layernorm.weight", hidden))
        add_unit(gate_up)
        add_unit(down)
    tensors.append(("model.norm.weight", hidden))
    if not config.is_tied:
        tensors.append(("lm_head.weight", (config.vocab_size, config.hidden_size)))
    return RowLayout(tensors)
