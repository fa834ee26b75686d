"""Models made by name, and the tiny one that reads images: what is written is what is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tinsmith.cli import main as command
from tinsmith.recipes.tasks.geometry_environment import CALCULATOR
from tinsmith.text.tokenizer import Tokenizer
from tinsmith_engine.loading.base_model import IN_ONE_PROCESS, load_model
from tinsmith_local.commands import make_models, model_sources
from tinsmith_local.made_models import MADE_MODELS
from tinsmith_local.tiny_model import MARKER_NAME
from tinsmith_local.tiny_vision_model import (
    IMAGE_PAD,
    VISION_END,
    VISION_START,
    build_tiny_vision_model,
)

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2*3"}}\n</tool_call>'


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("vision"))


@pytest.fixture(scope="module")
def tokenizer(seeing: Path) -> Tokenizer:
    names = ("tokenizer.json", "tokenizer_config.json")
    return Tokenizer({name: (seeing / name).read_bytes() for name in names})


def test_every_made_model_is_known_by_its_name(tmp_path: Path) -> None:
    found = make_models(model_sources(["mine=tiny-2x64"]), tmp_path)
    assert found == {"mine": str(tmp_path / "models" / "tiny-2x64")}
    assert (tmp_path / "models" / "tiny-2x64" / MARKER_NAME).is_file()
    assert set(MADE_MODELS) == {"tiny", "tiny-2x64", "tiny-vl"}


def test_the_command_makes_a_model_by_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, made in (([], "tiny"), (["--name", "tiny-2x64"], "tiny-2x64")):
        with pytest.raises(SystemExit) as ended:
            command(["models", "build-tiny", str(tmp_path / made), *words])
        assert not ended.value.code
        assert f"{made} model in" in capsys.readouterr().out
    weights = [
        (tmp_path / name / "model.safetensors").stat().st_size
        for name in MADE_MODELS
        if (tmp_path / name).exists()
    ]
    assert len(set(weights)) == 2
    with pytest.raises(SystemExit) as ended:
        command(["models", "build-tiny", str(tmp_path / "none"), "--name", "tiny-3"])
    assert ended.value.code
    assert "tiny-vl" in capsys.readouterr().err


def test_the_engine_loads_the_model_and_reads_its_images_as_they_are(seeing: Path) -> None:
    loaded = load_model(
        seeing,
        dtype="float32",
        device="cpu",
        max_sequence_tokens=512,
        num_threads=1,
        micro_batch_tokens=512,
        checkpoint_activations_over_tokens=10**9,
        exact=None,
        compiled=False,
        sharding=IN_ONE_PROCESS,
    )
    assert loaded.info.images is not None
    assert loaded.info.images.min_pixels == 28 * 28


def test_a_complete_directory_is_not_built_again(seeing: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in seeing.iterdir()}
    assert build_tiny_vision_model(seeing) == seeing
    assert {path.name: path.stat().st_mtime_ns for path in seeing.iterdir()} == before


def test_an_image_is_one_placeholder_between_its_marks(tokenizer: Tokenizer) -> None:
    content = [{"type": "image"}, {"type": "text", "text": "area?"}]
    text = tokenizer.render_chat_template([{"role": "user", "content": content}])
    assert f"{VISION_START}{IMAGE_PAD}{VISION_END}area?" in text
    assert tokenizer.encode(text).count(tokenizer.token_to_id(IMAGE_PAD) or -1) == 1


def test_a_call_reads_as_qwen_writes_it_and_costs_few_tokens(tokenizer: Tokenizer) -> None:
    call = {"function": {"name": "calculator", "arguments": {"expression": "2*3"}}}
    parsed = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    written = [{"role": "assistant", "content": CALL}]
    assert tokenizer.render_chat_template(parsed) == tokenizer.render_chat_template(written)
    assert len(tokenizer.encode(CALL)) < 30
    assert tokenizer.decode(tokenizer.encode(CALL)) == CALL


@pytest.mark.parametrize(
    ("description", "told"), [("", "Tools: calculator<"), ("Computes.", "calculator: Computes.<")]
)
def test_a_tool_is_told_whole(tokenizer: Tokenizer, description: str, told: str) -> None:
    asked = [{"role": "user", "content": "area?"}]
    function = {"name": CALCULATOR.name, "description": description}
    tool = {"type": "function", "function": {**function, "parameters": CALCULATOR.parameters}}
    assert told in tokenizer.render_chat_template(asked, tools=[tool])


def test_weights_are_those_of_the_seed(seeing: Path, tmp_path: Path) -> None:
    again = build_tiny_vision_model(tmp_path)
    name = "model.safetensors"
    assert (again / name).read_bytes() == (seeing / name).read_bytes()
    config = json.loads((seeing / "config.json").read_text())
    assert config["model_type"] == "qwen2_5_vl"
    assert np.prod(config["text_config"]["hidden_size"]) == 64
