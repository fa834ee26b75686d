"""The tiny model: deterministic files, the cache, and that transformers loads what is written."""

import json
from pathlib import Path

import pytest
import transformers

from tinsmith_local import tiny_model
from tinsmith_local.tiny_model import MARKER_NAME, TinyModelConfig, build_tiny_model

SMALL = TinyModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_key_value_heads=1)

FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), SMALL)


def test_writes_hugging_face_layout_and_nothing_else(built: Path) -> None:
    assert {path.name for path in built.iterdir()} == FILES | {MARKER_NAME}


def test_same_settings_give_the_same_bytes(built: Path, tmp_path: Path) -> None:
    again = build_tiny_model(tmp_path / "again", SMALL)
    for name in FILES | {MARKER_NAME}:
        assert (again / name).read_bytes() == (built / name).read_bytes(), name


def test_another_seed_gives_other_weights(built: Path, tmp_path: Path) -> None:
    other = TinyModelConfig(
        hidden_size=32, num_layers=1, num_heads=2, num_key_value_heads=1, seed=1
    )
    model = build_tiny_model(tmp_path, other) / "model.safetensors"
    assert model.read_bytes() != (built / "model.safetensors").read_bytes()


def test_complete_directory_is_not_built_again(
    built: Path,
) -> None:
    files = {path: path.stat().st_mtime_ns for path in built.iterdir()}
    assert build_tiny_model(built, SMALL) == built
    assert {path: path.stat().st_mtime_ns for path in built.iterdir()} == files


@pytest.mark.parametrize("damage", ["no-marker", "bad-marker", "truncated-file", "missing-file"])
def test_damaged_directory_is_repaired(built: Path, tmp_path: Path, damage: str) -> None:
    directory = build_tiny_model(tmp_path, SMALL)
    weights = directory / "model.safetensors"
    if damage == "no-marker":
        (directory / MARKER_NAME).unlink()
    elif damage == "bad-marker":
        (directory / MARKER_NAME).write_text("[]", encoding="utf-8")
    elif damage == "truncated-file":
        weights.write_bytes(weights.read_bytes()[:100])
    else:
        weights.unlink()
    build_tiny_model(directory, SMALL)
    assert weights.read_bytes() == (built / "model.safetensors").read_bytes()
    assert {path.name for path in directory.iterdir()} == FILES | {MARKER_NAME}


def test_other_settings_replace_the_model(tmp_path: Path) -> None:
    build_tiny_model(tmp_path, SMALL)
    build_tiny_model(
        tmp_path, TinyModelConfig(hidden_size=64, num_layers=1, num_heads=2, num_key_value_heads=2)
    )
    assert json.loads((tmp_path / "config.json").read_text())["hidden_size"] == 64


def test_transformers_loads_model_and_tokenizer(built: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(built)
    tokenizer = transformers.AutoTokenizer.from_pretrained(built)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer)
    token_ids = tokenizer("3+4=", return_tensors="pt")["input_ids"]
    assert model(token_ids).logits.shape == (1, 4, len(tokenizer))
    assert (model.generation_config.eos_token_id or [])[0] == tokenizer.eos_token_id


def test_chat_template_renders_and_round_trips(built: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(built)
    messages = [{"role": "user", "content": "12+34="}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\n12+34=<|im_end|>\n<|im_start|>assistant\n"
    whole = tokenizer.apply_chat_template(
        [*messages, {"role": "assistant", "content": "46"}], tokenize=False
    )
    assert whole == f"{prompt}46<|im_end|>\n"
    token_ids = tokenizer.encode(whole, add_special_tokens=False)
    assert tokenizer.decode(token_ids) == whole


def test_digits_and_special_tokens_are_single_tokens(built: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(built)
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]
    assert [tokenizer.convert_tokens_to_ids(t) for t in tiny_model.SPECIAL_TOKENS] == [0, 1, 2]
    assert tokenizer.tokenize("<|im_start|>user\n")[:2] == ["<|im_start|>", "user"]


def test_any_text_round_trips(built: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(built)
    text = "Grüße, 世界!  two  spaces\n\ttab 🙂"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(
    "settings", [{"hidden_size": 0}, {"num_heads": 3, "num_key_value_heads": 2}, {"head_dim": 7}]
)
def test_impossible_shapes_are_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        TinyModelConfig(**settings)
