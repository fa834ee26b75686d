"""Counts of a shape are those of the models that transformers and PEFT build from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import tinsmith
from tinsmith.planning.model_shape import ModelShape
from tinsmith_local.random_shapes import SHAPES

MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [3],
    "tie_word_embeddings": False,
}
DENSE = [pytest.param(dict(values), id=name) for name, values in SHAPES.items()]
# transformers warns of a name that PEFT asks it for.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated")
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]


def build(config: dict[str, Any]) -> Any:
    """Return the model of a configuration without its weights."""
    values = {key: value for key, value in config.items() if key != "model_type"}
    hf_config = AutoConfig.for_model(config["model_type"], **values)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(hf_config)


@pytest.mark.parametrize("config", [*DENSE, pytest.param(MOE, id="moe")])
def test_parameters_are_counted_as_transformers_makes_them(config: dict[str, Any]) -> None:
    model = build(config)
    assert ModelShape.of(config).num_parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("config", DENSE)
@pytest.mark.parametrize(("attention", "mlp"), [(True, True), (True, False), (False, True)])
def test_adapters_are_counted_as_peft_makes_them(
    config: dict[str, Any], attention: bool, mlp: bool
) -> None:
    targets = (ATTENTION if attention else []) + (MLP if mlp else [])
    adapted = get_peft_model(build(config), LoraConfig(r=8, target_modules=targets))
    counted = ModelShape.of(config).num_adapter_parameters(8, attention=attention, mlp=mlp)
    assert counted == sum(p.numel() for p in adapted.parameters() if p.requires_grad)


def test_a_token_meets_its_experts_alone() -> None:
    shape = ModelShape.of(MOE)
    idle_experts = (8 - 2) * 3 * 64 * 32 * shape.num_expert_layers
    assert shape.num_expert_layers == 1
    assert shape.num_parameters - shape.num_active_parameters == idle_experts + 256 * 64


def test_a_shape_is_read_from_a_directory_or_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MOE))
    assert ModelShape.read(tmp_path) == ModelShape.read(tmp_path / "config.json")
    assert ModelShape.read(tmp_path) == ModelShape.of(MOE)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        pytest.param("{", "cannot be read as a model's configuration", id="no-json"),
        pytest.param("[]", "holds no table", id="list"),
        pytest.param('{"model_type": "mamba"}', "models of the type mamba", id="family"),
        pytest.param('{"model_type": "llama"}', "has no hidden_size", id="size"),
        pytest.param(
            json.dumps(dict(SHAPES["smollm2-135m"]) | {"vocab_size": -1}),
            "no vocab_size",
            id="sign",
        ),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, text: str, named: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(tinsmith.ConfigurationError, match=named):
        ModelShape.read(file)
