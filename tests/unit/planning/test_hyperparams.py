"""Advice on hyper-parameters gives the figures that Tinker's documentation publishes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.unit.sdk.test_cli import invoke

from tinsmith import hyperparams
from tinsmith.errors import ConfigurationError
from tinsmith.planning.known_models import KNOWN_MODELS
from tinsmith.recipes.experiment.rates import choose_rate

LLAMA_8B = "meta-llama/Llama-3.1-8B"
QWEN_HALF_B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("model", "is_lora", "rate"),
    [
        (LLAMA_8B, True, 2.86e-4),
        (LLAMA_8B, False, 2.86e-5),
        ("meta-llama/Llama-3.1-70B", True, 1.66e-4),
        ("Qwen/Qwen3-8B", True, 4.73e-4),
        ("qwen3-30b-a3b", True, 4.99e-4),
    ],
)
def test_the_learning_rate_is_the_published_one(model: str, is_lora: bool, rate: float) -> None:
    assert hyperparams.get_lr(model, is_lora) == pytest.approx(rate, rel=2e-3)


@pytest.mark.parametrize(
    ("model", "factor"), [("meta-llama/Llama-3.2-1B", 32), ("meta-llama/Llama-3.1-70B", 128)]
)
def test_the_factor_of_an_adapter_is_that_of_the_primer(model: str, factor: int) -> None:
    assert hyperparams.get_lora_lr_over_full_finetune_lr(model) == factor


@pytest.mark.parametrize(
    ("model", "mlp", "attention", "unembedding"),
    [
        ("meta-llama/Llama-3.2-1B", 491_520, 212_992, 130_304),
        ("meta-llama/Llama-3.2-3B", 946_176, 573_440, 131_328),
        (LLAMA_8B, 1_769_472, 851_968, 132_352),
        ("meta-llama/Llama-3.3-70B-Instruct", 8_847_360, 4_096_000, 136_448),
        ("Qwen/Qwen3-4B-Instruct-2507", 1_327_104, 737_280, 154_496),
        ("Qwen/Qwen3-8B", 1_769_472, 958_464, 156_032),
        ("Qwen/Qwen3-32B", 5_898_240, 2_490_368, 157_056),
    ],
)
def test_an_adapter_of_a_dense_model_has_as_many_parameters_as_the_cookbook_counts(
    model: str, mlp: int, attention: int, unembedding: int
) -> None:
    count = hyperparams.get_lora_param_count
    assert count(model, 1, train_attn=False, train_unembed=False) == mlp
    assert count(model, 1, train_mlp=False, train_unembed=False) == attention
    assert count(model, 1, train_mlp=False, train_attn=False) == unembedding
    assert count(model, 32) == 32 * (mlp + attention + unembedding)


@pytest.mark.parametrize(
    ("model", "billions"),
    [
        ("meta-llama/Llama-3.2-1B", 1.24),
        (LLAMA_8B, 8.03),
        ("meta-llama/Llama-3.1-70B", 70.6),
        ("Qwen/Qwen3-0.6B", 0.6),
        ("Qwen/Qwen3-14B", 14.8),
        ("Qwen/Qwen3-30B-A3B", 30.5),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", 235.1),
    ],
)
def test_the_shapes_have_the_sizes_of_the_models(model: str, billions: float) -> None:
    assert KNOWN_MODELS[model].num_parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_small_data_gets_smaller_batches_and_large_data_a_larger_rank() -> None:
    plain = hyperparams.advise(LLAMA_8B)
    assert (plain.batch_size, plain.num_steps, plain.rank, plain.num_epochs) == (128, 100, 32, None)
    small = hyperparams.advise(LLAMA_8B, num_examples=1_000)
    assert (small.batch_size, small.num_epochs) == (16, 1.6)
    large = hyperparams.advise(LLAMA_8B, num_trained_tokens=100_000_000)
    assert large.rank == 64
    assert large.num_adapter_parameters > 100_000_000
    assert not large.note
    assert "train all weights" in hyperparams.advise(LLAMA_8B, num_trained_tokens=10**9).note


def test_a_model_that_nothing_is_known_of_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"gpt-2 is not known here; .*config\.json"):
        hyperparams.get_lr("gpt-2")


def test_the_command_advises_by_name_and_by_directory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert invoke("hyperparams", LLAMA_8B, "--num-examples", "1000") == 0
    shown = capsys.readouterr().out
    assert "learning rate  0.000286 of an adapter" in shown
    assert "100 at least, 1.6 epochs" in shown
    assert "learning_rate=0.0001,0.0003,0.0009" in shown
    (tmp_path / "config.json").write_text(json.dumps(QWEN_HALF_B))
    assert invoke("hyperparams", str(tmp_path), "--json") == 0
    assert 0 < json.loads(capsys.readouterr().out)["learning_rate"] < 1
    assert invoke("hyperparams", "gpt-2") == 1


def test_an_experiment_takes_the_advice_unless_it_is_given_a_rate() -> None:
    chosen = choose_rate(None, LLAMA_8B, "lora", default=1e-2)
    assert chosen.value == hyperparams.get_lr(LLAMA_8B)
    assert chosen.note == f"learning_rate=0.000286, as advised for {LLAMA_8B}"
    full = choose_rate(None, LLAMA_8B, "full", default=1e-2)
    assert full.value == hyperparams.get_lr(LLAMA_8B, is_lora=False)
    other = choose_rate(None, LLAMA_8B, "lora", default=1e-2, advised=1e-5)
    assert (other.value, choose_rate(None, "tiny", "lora", default=1, advised=1e-5).value) == (
        1e-5,
        1,
    )
    unknown = choose_rate(None, "tiny", "lora", default=1e-2)
    assert unknown.value == 1e-2
    assert "none is advised for tiny" in unknown.note
    assert choose_rate(1e-3, "tiny", "lora", default=1e-2).note == ""
    assert choose_rate(3e-4, LLAMA_8B, "lora", default=1e-2).note == ""
    far = choose_rate(1e-2, LLAMA_8B, "lora", default=1e-2)
    assert far.value == 1e-2
    assert far.note.startswith("warning: learning_rate=0.01 is far from 0.000286")
