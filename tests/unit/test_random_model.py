"""Models of real shapes with random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tinsmith_local.random_model import build_random_model
from tinsmith_local.random_shapes import SHAPES
from tinsmith_runtime.errors import ConfigError


def test_a_model_has_the_shape_that_was_published(tmp_path: Path) -> None:
    directory = build_random_model(tmp_path / "model", "smollm2-135m", num_layers=1)
    config = json.loads((directory / "config.json").read_text())
    wanted = dict(SHAPES["smollm2-135m"]) | {"num_hidden_layers": 1}
    wanted["rope_parameters"] = {"rope_type": "default", "rope_theta": wanted.pop("rope_theta")}
    assert {name: config[name] for name in wanted} == wanted
    assert (directory / "tokenizer.json").is_file()
    # 49,152 x 576 embeddings, tied, and one layer.
    assert (directory / "model.safetensors").stat().st_size == pytest.approx(127.4e6, rel=0.01)


def test_an_unknown_shape_names_those_that_are_known(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no shape 'gpt-5'; use one of smollm2-135m, qwen2"):
        build_random_model(tmp_path / "model", "gpt-5")
    assert not (tmp_path / "model").exists()
