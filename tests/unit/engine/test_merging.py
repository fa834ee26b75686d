"""Merged models: what transformers computes with them is what the engine computes with the run."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engine.conftest import VOCAB, make_batch, randomise_b, save_tiny

from tinsmith_engine import AdamParams, AdapterConfig, Engine, FullConfig, LoraConfig
from tinsmith_engine.files.weight_files import ADAPTER_FILE, MODEL_FILE, MODEL_INDEX_FILE
from tinsmith_engine.runs.merging import MergedModel
from tinsmith_runtime.errors import CheckpointIncompatibleError

# Both sides round in float32, in another order; log-probabilities are about -5.
TOLERANCE = 2e-5


def merged(
    model_dir: Path, engine: Engine, config: AdapterConfig, folder: Path, shard_bytes: int = 2**30
) -> list[str]:
    """Export a run as a model; return the names of the files in the order of their ends."""
    tensors, _ = engine.adapter_tensors("r")
    weights = folder / "in" / (MODEL_FILE if isinstance(config, FullConfig) else ADAPTER_FILE)
    weights.parent.mkdir()
    save_file(tensors, weights)
    found: list[str] = []
    model = MergedModel(
        model_dir, weights, config, engine.model.lora_targets, max_shard_bytes=shard_bytes
    )
    model.write(folder, lambda path: found.append(path.name))
    return found


def run_of(model_dir: Path, config: AdapterConfig, dtype: str = "float32") -> Engine:
    engine = Engine.load(model_dir, max_resident_runs=2, dtype=dtype, exact=False)
    engine.create_run("r", config)
    if isinstance(config, LoraConfig):
        randomise_b(engine, "r")
    else:
        engine.forward_backward("r", make_batch(), "cross_entropy", {})
        engine.optim_step("r", AdamParams(learning_rate=1e-2))
    return engine


def load_merged(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        assert not report[kind], report
    return model.eval()


def largest_difference(folder: Path, engine: Engine) -> float:
    batch = make_batch()
    ours = engine.forward("r", batch, "cross_entropy", {}).logprobs
    model = load_merged(folder)
    worst = 0.0
    for datum, logprobs_T in zip(batch, ours, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor(datum.tokens_T)[None]).logits[0].float()
        found = torch.log_softmax(logits, -1)[torch.arange(len(datum.targets_T)), datum.targets_T]
        worst = max(worst, float(np.abs(found.numpy() - logprobs_T).max()))
    return worst


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe", "gpt_neox"])
def test_a_merged_adapter_computes_as_the_run(family: str, tmp_path: Path) -> None:
    model_dir = save_tiny(tmp_path / "base", family)
    config = LoraConfig(rank=4, seed=1, alpha=6.0)
    engine = run_of(model_dir, config)
    (tmp_path / "out").mkdir()
    merged(model_dir, engine, config, tmp_path / "out")
    assert largest_difference(tmp_path / "out", engine) < TOLERANCE


def test_experts_that_are_stored_as_one_tensor_are_merged(tmp_path: Path) -> None:
    model_dir = save_tiny(tmp_path / "base", "qwen3_moe")
    tensors = load_file(model_dir / MODEL_FILE)
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        if f"{prefix}.gate_up_proj" in tensors:
            continue
        pairs = [
            torch.cat([tensors.pop(f"{prefix}.{e}.{n}_proj.weight") for n in ("gate", "up")])
            for e in range(8)
        ]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack(pairs)
        down = [tensors.pop(f"{prefix}.{e}.down_proj.weight") for e in range(8)]
        tensors[f"{prefix}.down_proj"] = torch.stack(down)
    save_file(tensors, model_dir / MODEL_FILE, {"format": "pt"})
    config = LoraConfig(rank=2, seed=1)
    engine = run_of(model_dir, config)
    (tmp_path / "out").mkdir()
    merged(model_dir, engine, config, tmp_path / "out")
    assert set(load_file(tmp_path / "out" / MODEL_FILE)) == set(tensors)
    # A stacked tensor loads in transformers as it is.
    assert largest_difference(tmp_path / "out", engine) < TOLERANCE


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_adapted_unembedding_becomes_a_tensor_of_its_own(is_tied: bool, tmp_path: Path) -> None:
    model_dir = save_tiny(tmp_path / "base", "qwen3", tie_word_embeddings=is_tied)
    config = LoraConfig(rank=2, seed=1, train_unembedding=True)
    engine = run_of(model_dir, config)
    (tmp_path / "out").mkdir()
    merged(model_dir, engine, config, tmp_path / "out")
    assert (
        json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False
    )
    assert largest_difference(tmp_path / "out", engine) < TOLERANCE


def test_a_full_run_is_its_own_weights(tmp_path: Path, qwen3_dir: Path) -> None:
    engine = run_of(qwen3_dir, FullConfig())
    merged(qwen3_dir, engine, FullConfig(), tmp_path)
    assert largest_difference(tmp_path, engine) < TOLERANCE


def test_a_large_model_is_written_in_shards(tmp_path: Path, qwen3_dir: Path) -> None:
    config = LoraConfig(rank=2, seed=1)
    engine = run_of(qwen3_dir, config)
    files = merged(qwen3_dir, engine, config, tmp_path, shard_bytes=80_000)
    shards = [name for name in files if name.endswith(".safetensors")]
    assert len(shards) > 2
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    assert files[-1] == MODEL_INDEX_FILE
    assert all((tmp_path / name).stat().st_size < 82_000 for name in shards)
    index = json.loads((tmp_path / MODEL_INDEX_FILE).read_text())
    assert set(index["weight_map"].values()) == set(shards)
    assert largest_difference(tmp_path, engine) < TOLERANCE


def test_weights_keep_the_dtype_of_the_base_files(tmp_path: Path) -> None:
    model_dir = save_tiny(tmp_path / "base", "qwen3", dtype="bfloat16")
    tensors = {n: t.to(torch.bfloat16) for n, t in load_file(model_dir / MODEL_FILE).items()}
    save_file(tensors, model_dir / MODEL_FILE, {"format": "pt"})
    config = LoraConfig(rank=2, seed=1)
    engine = run_of(model_dir, config)
    (tmp_path / "out").mkdir()
    merged(model_dir, engine, config, tmp_path / "out")
    found = load_file(tmp_path / "out" / MODEL_FILE)
    adapter, _ = engine.adapter_tensors("r")
    name = "model.layers.0.self_attn.q_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{x}.weight"] for x in "AB")
    wanted = tensors[f"{name}.weight"].float() + 32.0 / 2 * (b @ a)
    # Rounded once, from the float32 sum.
    half_step = wanted.abs() * 2.0**-8
    assert ((found[f"{name}.weight"].float() - wanted).abs() <= half_step).all()
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


def test_a_base_without_the_tensor_is_refused(tmp_path: Path, qwen3_dir: Path) -> None:
    config = LoraConfig(rank=2, seed=1)
    engine = run_of(qwen3_dir, config)
    other = save_tiny(tmp_path / "base", "qwen3")
    tensors = load_file(other / MODEL_FILE)
    tensors["other.weight"] = tensors.pop("model.layers.1.self_attn.q_proj.weight")
    save_file(tensors, other / MODEL_FILE, {"format": "pt"})
    (tmp_path / "out").mkdir()
    with pytest.raises(CheckpointIncompatibleError) as refused:
        merged(other, engine, config, tmp_path / "out")
    assert refused.value.metadata["tensor"] == "model.layers.1.self_attn.q_proj.weight"
    assert VOCAB == 96
