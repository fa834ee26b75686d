"""Which models the packed forward can run, and their shapes.

Qwen3, Qwen2, Llama and Qwen3-MoE are one decoder with flags: biases on some projections, norms on q
and k, tied embeddings, experts in place of some layers' MLP. What this module does not recognise
in full is left to the fallback rather than run approximately. Examples are sliding windows,
another activation, and rotary frequencies that depend on the sequence length.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tinsmith_engine.arena.adapter_targets import ExpertSpecs, LayerSpec, TargetSpec, target_specs
from tinsmith_engine.arena.slots import ParameterLayout

_FAMILIES = ("qwen3", "qwen2", "llama", "qwen3_moe", "qwen2_5_vl")
_VISION_FAMILIES = ("qwen2_5_vl",)
_QK_NORM_FAMILIES = ("qwen3", "qwen3_moe")
_STATIC_ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Which layers have experts, and how tokens are routed to them."""

    layers: frozenset[int]
    num_experts: int
    num_chosen: int
    """Experts of each token."""
    normalises: bool
    """Whether the weights of a token's experts are made to sum to 1."""
    intermediate_size: int
    """Of one expert."""


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
    moe: MoeConfig | None = None
    prefix: str = "model"
    """Module path of the decoder."""
    rope_axes: Tensor | None = None
    """Of a model that reads images, which of a token's three positions each frequency turns with,
    int64 [D / 2]."""

    @property
    def num_qk_heads(self) -> int:
        """Heads that are normed and rotated: q and k."""
        return self.num_heads + self.num_kv_heads

    def experts_of(self, layer: int) -> MoeConfig | None:
        """Return how a layer's experts work, or None if its MLP is dense."""
        return self.moe if self.moe is not None and layer in self.moe.layers else None


def decoder_config(hf_config: Any) -> DecoderConfig | None:
    """Return the decoder for a transformers configuration, or None if the fallback must run it."""
    family, outer = hf_config.model_type, hf_config
    hf_config = hf_config.get_text_config()
    if family not in _FAMILIES or hf_config.hidden_act != "silu":
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
        family=family,
        vocab_size=hf_config.vocab_size,
        hidden_size=hf_config.hidden_size,
        intermediate_size=hf_config.intermediate_size,
        num_layers=hf_config.num_hidden_layers,
        num_heads=hf_config.num_attention_heads,
        num_kv_heads=hf_config.num_key_value_heads or hf_config.num_attention_heads,
        head_dim=head_dim,
        rms_eps=hf_config.rms_norm_eps,
        max_positions=hf_config.max_position_embeddings,
        is_tied=bool(outer.tie_word_embeddings),
        has_qk_norm=family in _QK_NORM_FAMILIES,
        inverse_frequencies=rope[0],
        rope_scale=rope[1],
        moe=_moe(hf_config) if family == "qwen3_moe" else None,
        prefix="model.language_model" if family in _VISION_FAMILIES else "model",
        rope_axes=_rope_axes(hf_config) if family in _VISION_FAMILIES else None,
    )


def _rope_axes(hf_config: Any) -> Tensor:
    sections = torch.tensor(hf_config.rope_parameters["mrope_section"])
    return torch.arange(len(sections)).repeat_interleave(sections)


def stored_names(config: DecoderConfig, names: Collection[str]) -> Mapping[str, str]:
    """Return under which name a checkpoint stores each tensor, by its name here.

    The hub and `save_pretrained` write the decoder of a vision-language model without the part of
    the path that tells it from the vision tower.
    """
    found = {name: name for name in names}
    if config.prefix != "model":
        found |= {
            name.replace("model.", f"{config.prefix}.", 1): name
            for name in names
            if name.startswith("model.") and not name.startswith(f"{config.prefix}.")
        }
    return found


def _moe(hf_config: Any) -> MoeConfig | None:
    layers = frozenset(
        layer
        for layer in range(hf_config.num_hidden_layers)
        if layer not in (hf_config.mlp_only_layers or ())
        and (layer + 1) % hf_config.decoder_sparse_step == 0
    )
    if not layers or not hf_config.num_experts:
        return None
    return MoeConfig(
        layers=layers,
        num_experts=hf_config.num_experts,
        num_chosen=hf_config.num_experts_per_tok,
        normalises=bool(hf_config.norm_topk_prob),
        intermediate_size=hf_config.moe_intermediate_size,
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


def layer_targets(
    config: DecoderConfig, layer: int
) -> tuple[TargetSpec, TargetSpec, LayerSpec, LayerSpec]:
    """Return the four fused linear layers of a block: qkv, o, gate and up, down.

    The last two are there for each expert where the layer has experts. The router is none of them:
    it takes no adapter.
    """
    attention, mlp = (
        f"{config.prefix}.layers.{layer}.self_attn",
        f"{config.prefix}.layers.{layer}.mlp",
    )
    hidden = config.hidden_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    moe = config.experts_of(layer)
    gate_up: LayerSpec
    down: LayerSpec
    if moe is None:
        gate_up, down = _mlp_targets(mlp, hidden, config.intermediate_size)
    else:
        experts = [
            _mlp_targets(f"{mlp}.experts.{expert}", hidden, moe.intermediate_size)
            for expert in range(moe.num_experts)
        ]
        gate_up, down = (ExpertSpecs(targets) for targets in zip(*experts, strict=True))
    return (
        TargetSpec(
            tuple(f"{attention}.{name}_proj" for name in "qkv"), hidden, (q, kv, kv), "attention"
        ),
        TargetSpec((f"{attention}.o_proj",), q, (hidden,), "attention"),
        gate_up,
        down,
    )


def _mlp_targets(mlp: str, hidden: int, inner: int) -> tuple[TargetSpec, TargetSpec]:
    return (
        TargetSpec((f"{mlp}.gate_proj", f"{mlp}.up_proj"), hidden, (inner, inner), "mlp"),
        TargetSpec((f"{mlp}.down_proj",), inner, (hidden,), "mlp"),
    )


def router_name(config: DecoderConfig, layer: int) -> str:
    """Return the weight that chooses a token's experts, [experts, hidden]."""
    return f"{config.prefix}.layers.{layer}.mlp.gate.weight"


def fused_experts(config: DecoderConfig) -> Mapping[str, Sequence[str]]:
    """Return the tensors that a checkpoint may hold as one, by the name of that one.

    The hub has a tensor for each expert; transformers computes with one for all, [experts, out,
    in], and may be asked to save that.
    """
    found: dict[str, Sequence[str]] = {}
    for layer in sorted(config.moe.layers) if config.moe is not None else ():
        _, _, gate_up, down = layer_targets(config, layer)
        for name, spec in (("gate_up_proj", gate_up), ("down_proj", down)):
            parts = [part for target in target_specs([spec]) for part in target.names]
            found[f"{config.prefix}.layers.{layer}.mlp.experts.{name}"] = [
                f"{part}.weight" for part in parts
            ]
    return found


def head_target(config: DecoderConfig) -> TargetSpec:
    """Return the unembedding."""
    return TargetSpec(("lm_head",), config.hidden_size, (config.vocab_size,), "unembedding")


def full_layout(config: DecoderConfig, stored_names: Collection[str]) -> ParameterLayout:
    """Return the layout of all weights, under their Hugging Face names.

    `stored_names` are the tensors of the checkpoint: biases exist where it has them.
    """
    hidden = (config.hidden_size,)
    tensors: list[tuple[str, tuple[int, ...]]] = [
        (f"{config.prefix}.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    ]

    def add_target(target: TargetSpec) -> None:
        sizes = list(zip(target.names, target.num_outputs, strict=True))
        tensors.extend((f"{name}.weight", (size, target.num_inputs)) for name, size in sizes)
        if f"{target.names[0]}.bias" in stored_names:
            tensors.extend((f"{name}.bias", (size,)) for name, size in sizes)

    for layer in range(config.num_layers):
        prefix = f"{config.prefix}.layers.{layer}"
        qkv, o, gate_up, down = layer_targets(config, layer)
        tensors.append((f"{prefix}.input_layernorm.weight", hidden))
        add_target(qkv)
        if config.has_qk_norm:
            tensors.append((f"{prefix}.self_attn.q_norm.weight", (config.head_dim,)))
            tensors.append((f"{prefix}.self_attn.k_norm.weight", (config.head_dim,)))
        add_target(o)
        tensors.append((f"{prefix}.post_attention_layernorm.weight", hidden))
        moe = config.experts_of(layer)
        if moe is not None:
            tensors.append((router_name(config, layer), (moe.num_experts, config.hidden_size)))
        for target in target_specs([gate_up, down]):
            add_target(target)
    tensors.append((f"{config.prefix}.norm.weight", hidden))
    if not config.is_tied:
        tensors.append(("lm_head.weight", (config.vocab_size, config.hidden_size)))
    return ParameterLayout(tensors)
