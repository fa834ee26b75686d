"""Heads that others saved: in adapters of PEFT, and in files of models that say they are tied."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engine.conftest import make_batch, save_tiny
from tests.unit.engine.test_merging import TOLERANCE, largest_difference, merged, run_of
from tests.unit.engine.test_peft_import import imported, make_adapter

from tinsmith_engine import Engine, FullConfig, LoraConfig
from tinsmith_engine.files.base_copies import holds_another_head
from tinsmith_engine.files.weight_files import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MODEL_FILE,
    read_header_of,
)
from tinsmith_engine.runs.peft_import import plan_import
from tinsmith_runtime.errors import AdapterUnsupportedError, CheckpointIncompatibleError
from tinsmith_sampler.config import SamplerConfig
from tinsmith_sampler.vllm.source import describe

COPY = "base_model.model.lm_head.base_layer.weight"


def logprobs_of(model: Any, engine: Engine) -> tuple[np.ndarray, np.ndarray]:
    """Return the log-probabilities of one datum by the engine's run and by a model."""
    (datum,) = make_batch(lengths=(19,))
    ours = engine.forward("r", [datum], "cross_entropy", {}).logprobs[0]
    with torch.no_grad():
        logits = model(torch.tensor(datum.tokens_T)[None]).logits[0]
    theirs = torch.log_softmax(logits, -1)[torch.arange(19), torch.tensor(datum.targets_T)]
    return ours, theirs.numpy()


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_of_the_head_computes_as_in_peft(
    is_tied: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = save_tiny(tmp_path / "base", "qwen3", tie_word_embeddings=is_tied)
    model = make_adapter(directory, tmp_path, target_modules=["q_proj", "lm_head"])
    stored = load_file(tmp_path / ADAPTER_FILE)
    stored[COPY] = stored[COPY].to(dtype)
    save_file(stored, tmp_path / ADAPTER_FILE)
    engine = Engine.load(directory, micro_batch_tokens=32)
    assert imported(engine, tmp_path, directory).train_unembedding
    # Float32 sums in another order.
    np.testing.assert_allclose(*logprobs_of(model, engine), atol=2e-5)


@pytest.mark.parametrize("change", [lambda head: head + 1, lambda head: head[:-1]])
def test_a_head_that_is_not_the_base_models_is_refused_by_name(
    change: Any, qwen3_dir: Path, tmp_path: Path
) -> None:
    make_adapter(qwen3_dir, tmp_path, target_modules=["q_proj", "lm_head"])
    stored = load_file(tmp_path / ADAPTER_FILE)
    stored[COPY] = change(stored[COPY]).contiguous()
    save_file(stored, tmp_path / ADAPTER_FILE)
    with pytest.raises(CheckpointIncompatibleError, match="merge_and_unload") as refused:
        imported(Engine.load(qwen3_dir, micro_batch_tokens=32), tmp_path, qwen3_dir)
    assert refused.value.metadata["tensor"] == COPY


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"modules_to_save": ["embed_tokens"]}, "modules_to_save"),
    ],
)
def test_whole_layers_of_an_adapter_are_refused_with_the_way_out(
    settings: dict[str, Any], named: str, qwen3_dir: Path, tmp_path: Path
) -> None:
    make_adapter(qwen3_dir, tmp_path, target_modules=["q_proj"], **settings)
    with pytest.raises(AdapterUnsupportedError, match="merge_and_unload") as refused:
        imported(Engine.load(qwen3_dir, micro_batch_tokens=32), tmp_path, qwen3_dir)
    assert refused.value.metadata["setting"] == named


def test_an_adapter_of_the_embedding_is_refused_by_name(qwen3_dir: Path, tmp_path: Path) -> None:
    make_adapter(qwen3_dir, tmp_path, target_modules=["q_proj", "embed_tokens"])
    header = read_header_of(tmp_path / ADAPTER_FILE)
    settings = (tmp_path / ADAPTER_CONFIG_FILE).read_bytes()
    engine = Engine.load(qwen3_dir, micro_batch_tokens=32)
    with pytest.raises(CheckpointIncompatibleError, match="lora_embedding_A is of the embedding"):
        plan_import(settings, header, engine.model.lora_targets)


@pytest.fixture
def untied_dir(tmp_path: Path) -> Path:
    """A model that says it is tied, with a head of its own in its file."""
    directory = save_tiny(tmp_path / "untied", "qwen3", tie_word_embeddings=True)
    tensors = load_file(directory / MODEL_FILE)
    torch.manual_seed(7)
    tensors["lm_head.weight"] = 0.1 * torch.randn_like(tensors["model.embed_tokens.weight"])
    save_file(tensors, directory / MODEL_FILE, {"format": "pt"})
    return directory


def test_a_head_that_differs_is_read_though_the_settings_say_tied(untied_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    engine = Engine.load(untied_dir, micro_batch_tokens=32)
    engine.create_run("r", LoraConfig(rank=2, seed=1))
    model = AutoModelForCausalLM.from_pretrained(untied_dir).eval()
    np.testing.assert_allclose(*logprobs_of(model, engine), atol=2e-5)


def test_a_copy_of_the_embedding_is_no_head_of_its_own(untied_dir: Path) -> None:
    assert holds_another_head(untied_dir)
    tensors = load_file(untied_dir / MODEL_FILE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, untied_dir / MODEL_FILE, {"format": "pt"})
    assert not holds_another_head(untied_dir)
    assert Engine.load(untied_dir, micro_batch_tokens=32).model.config.is_tied
    del tensors["lm_head.weight"]
    save_file(tensors, untied_dir / MODEL_FILE, {"format": "pt"})
    assert not holds_another_head(untied_dir)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(rank=2, seed=1),
        LoraConfig(rank=2, seed=1, train_unembedding=True),
        FullConfig(),
    ],
    ids=["adapter", "adapter-of-the-head", "full"],
)
def test_a_merged_export_says_that_the_head_is_its_own(
    config: LoraConfig | FullConfig, untied_dir: Path, tmp_path: Path
) -> None:
    engine = run_of(untied_dir, config)
    out = tmp_path / "out"
    out.mkdir()
    merged(untied_dir, engine, config, out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    assert largest_difference(out, engine) < TOLERANCE
    shutil.rmtree(out)


def test_a_sampler_of_vllm_refuses_what_vllm_would_read_otherwise(untied_dir: Path) -> None:
    config = SamplerConfig(worker_name="a", storage_uri="file:///nowhere")
    with pytest.raises(CheckpointIncompatibleError, match="set tie_word_embeddings to false"):
        describe(untied_dir, config, 1)


def test_a_header_of_1152_bytes_is_not_taken_for_a_pickle(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2)}
    save_file(tensors, tmp_path / "a.safetensors", {"note": ""})
    length = int.from_bytes((tmp_path / "a.safetensors").read_bytes()[:8], "little")
    save_file(tensors, tmp_path / "a.safetensors", {"note": "x" * (1152 - length)})
    assert (tmp_path / "a.safetensors").read_bytes()[:2] == b"\x80\x04"
    assert list(read_header_of(tmp_path / "a.safetensors")) == ["a"]
