"""What no adapter reaches is named in what a model says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.engine.conftest import save_tiny
from transformers import GPT2Config, GPT2LMHeadModel

from tinsmith_engine.contract.codec import encode_model
from tinsmith_engine.training.engine import Engine


@pytest.mark.parametrize(
    ("family", "unreached"),
    [
        pytest.param("qwen3", [], id="all-reached"),
        pytest.param("qwen3_moe", ["model.layers.*.mlp.gate"], id="router"),
    ],
)
def test_matrices_without_an_adapter_are_named(
    family: str, unreached: list[str], tmp_path: Path
) -> None:
    engine = Engine.load(save_tiny(tmp_path / "model", family), max_resident_runs=1)
    message = encode_model("m", engine.info, tokenizer_digest="", stop_token_ids=())
    assert list(message.layers_without_adapters) == unreached


def test_layers_of_another_class_are_named(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    found = Engine.load(tmp_path, max_resident_runs=1).info.layers_without_adapters
    assert list(found) == [
        "transformer.h.*.attn.c_attn",
        "transformer.h.*.attn.c_proj",
        "transformer.h.*.mlp.c_fc",
        "transformer.h.*.mlp.c_proj",
    ]
