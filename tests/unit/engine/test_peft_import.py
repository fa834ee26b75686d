"""Adapters made with PEFT itself, as runs; and adapters that no run can be."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.engine.conftest import VOCAB, make_batch, save_tiny

from tinsmith_engine import AdamParams, Engine, LoraConfig
from tinsmith_engine.files.weight_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, read_header_of
from tinsmith_engine.runs.peft_import import plan_import, read_import
from tinsmith_runtime.errors import (
    AdapterUnsupportedError,
    CheckpointIncompatibleError,
    FileRefusedError,
    TinsmithError,
)

ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def make_adapter(model_dir: Path, folder: Path, **settings: Any) -> Any:
    """Write an adapter with PEFT; return the model that wears it."""
    import peft
    from transformers import AutoModelForCausalLM

    settings = {"r": 4, "lora_alpha": 6, "target_modules": ALL_LINEAR, **settings}
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
        torch.manual_seed(5)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(std=0.1)
        model.save_pretrained(folder)
    return model.eval()


def imported(engine: Engine, folder: Path, base_dir: Path) -> LoraConfig:
    """Load an adapter into a run `r` of the engine."""
    units = engine.model.lora_targets
    settings = (folder / ADAPTER_CONFIG_FILE).read_bytes()
    config = plan_import(settings, read_header_of(folder / ADAPTER_FILE), units)
    engine.create_run("r", config)
    engine.load_adapter_tensors("r", read_import(folder / ADAPTER_FILE, config, units, base_dir))
    return config


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        pytest.param({}, {"rank": 4, "alpha": 6.0}, id="all-linear"),
        pytest.param({"target_modules": ["q_proj", "v_proj"]}, {"train_mlp": False}, id="q-and-v"),
        pytest.param({"layers_to_transform": [1]}, {}, id="one-layer"),
        pytest.param({"use_rslora": True}, {"alpha": 12.0}, id="rslora"),
        pytest.param({"lora_dropout": 0.1}, {}, id="dropout"),
        pytest.param({"target_modules": "all-linear"}, {}, id="by-word"),
    ],
)
def test_an_adapter_of_peft_computes_as_in_peft(
    settings: dict[str, Any],
    wanted: dict[str, Any],
    engine: Engine,
    qwen3_dir: Path,
    tmp_path: Path,
) -> None:
    model = make_adapter(qwen3_dir, tmp_path, **settings)
    config = imported(engine, tmp_path, qwen3_dir)
    assert {name: getattr(config, name) for name in wanted} == wanted
    tokens_T = np.random.default_rng(0).integers(0, VOCAB, 20)
    (datum,) = make_batch(lengths=(19,))
    ours = engine.forward("r", [datum], "cross_entropy", {}).logprobs[0]
    with torch.no_grad():
        logits = model(torch.tensor(datum.tokens_T)[None]).logits[0]
    theirs = torch.log_softmax(logits, -1)[torch.arange(19), torch.tensor(datum.targets_T)]
    # Float32 sums in another order.
    np.testing.assert_allclose(ours, theirs.numpy(), atol=2e-5)
    assert len(tokens_T) == 20


def test_modules_that_were_left_out_stay_out_in_training(
    engine: Engine, qwen3_dir: Path, tmp_path: Path
) -> None:
    make_adapter(qwen3_dir, tmp_path, target_modules=["q_proj"])
    imported(engine, tmp_path, qwen3_dir)
    for _ in range(2):
        engine.forward_backward("r", make_batch(), "cross_entropy", {})
        engine.optim_step("r", AdamParams(learning_rate=1e-2, weight_decay=0.1))
    tensors, _ = engine.adapter_tensors("r")
    assert all(not tensor.any() for name, tensor in tensors.items() if "q_proj" not in name)
    assert all(tensor.any() for name, tensor in tensors.items() if "q_proj" in name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(
    dtype: torch.dtype, engine: Engine, qwen3_dir: Path, tmp_path: Path
) -> None:
    make_adapter(qwen3_dir, tmp_path)
    tensors = {n: t.to(dtype) for n, t in load_file(tmp_path / ADAPTER_FILE).items()}
    save_file(tensors, tmp_path / ADAPTER_FILE)
    imported(engine, tmp_path, qwen3_dir)
    found, _ = engine.adapter_tensors("r")
    assert all(torch.equal(found[name], tensors[name].float()) for name in found)


def test_alpha_is_what_the_contract_can_hold(
    engine: Engine, qwen3_dir: Path, tmp_path: Path
) -> None:
    make_adapter(qwen3_dir, tmp_path, r=3, lora_alpha=5, use_rslora=True)
    alpha = imported(engine, tmp_path, qwen3_dir).alpha
    assert alpha == float(np.float32(5 * math.sqrt(3)))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", None),
        ("task_type", "SEQ_CLS"),
        ("r", 0),
        ("r", 129),
        ("r", 10**30),
        ("r", "4"),
        ("r", True),
        ("lora_alpha", -1),
        ("lora_alpha", "16"),
        ("lora_alpha", 1e300),
        ("lora_alpha", 1e-60),
        ("use_rslora", "yes"),
        ("use_dora", True),
        ("bias", "lora_only"),
        ("lora_bias", True),
        ("modules_to_save", ["lm_head"]),
        ("rank_pattern", {"q_proj": 8}),
        ("alpha_pattern", {"q_proj": 8}),
        ("fan_in_fan_out", True),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", ["gaussian"]),
        ("layer_replication", [[0, 2]]),
        ("target_parameters", ["experts"]),
        ("trainable_token_indices", [1]),
        ("alora_invocation_tokens", [1]),
        ("something_new", 1),
    ],
)
def test_a_setting_without_counterpart_is_refused_by_name(
    setting: str, value: Any, unchanged_engine: Engine
) -> None:
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 6, setting: value}
    with pytest.raises(AdapterUnsupportedError) as refused:
        plan_import(json.dumps(settings).encode(), {}, unchanged_engine.model.lora_targets)
    assert refused.value.metadata["setting"] == setting


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000, b"{}" + b" " * 2**20, b'{"r": NaN}'],
    ids=["empty", "cut", "list", "no-utf8", "deep", "large", "nan"],
)
def test_settings_that_are_none_are_refused(content: bytes, unchanged_engine: Engine) -> None:
    with pytest.raises(TinsmithError) as refused:
        plan_import(content, {}, unchanged_engine.model.lora_targets)
    assert isinstance(refused.value, FileRefusedError | AdapterUnsupportedError)


def _drop(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        pytest.param({A: torch.zeros(4, 63)}, A, id="shape"),
        pytest.param({A: torch.zeros(5, 64)}, A, id="rank"),
        pytest.param({A: torch.zeros(4, 64, dtype=torch.int8)}, A, id="integers"),
        pytest.param({A: torch.zeros(4, 64, dtype=torch.float64)}, A, id="float64"),
        pytest.param({A: None}, A, id="missing"),
        pytest.param({A: torch.full((4, 64), float("nan"))}, A, id="nan"),
        pytest.param({A: torch.full((4, 64), float("inf"))}, A, id="infinity"),
        pytest.param(
            {"base_model.model.lm_head.weight": torch.zeros(2, 2)},
            "base_model.model.lm_head.weight",
            id="not-an-adapter",
        ),
        pytest.param(
            {A.replace("layers.0", "layers.7"): torch.zeros(4, 64)},
            A.replace("layers.0", "layers.7"),
            id="other-layer",
        ),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    change: dict[str, torch.Tensor | None],
    named: str,
    engine: Engine,
    qwen3_dir: Path,
    tmp_path: Path,
) -> None:
    make_adapter(qwen3_dir, tmp_path)
    changed = {**load_file(tmp_path / ADAPTER_FILE), **change}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    save_file(kept, tmp_path / ADAPTER_FILE)
    with pytest.raises(CheckpointIncompatibleError) as refused:
        imported(engine, tmp_path, qwen3_dir)
    assert refused.value.metadata["tensor"] == named


def test_an_adapter_without_tensors_is_refused(
    engine: Engine, qwen3_dir: Path, tmp_path: Path
) -> None:
    make_adapter(qwen3_dir, tmp_path)
    save_file({}, tmp_path / ADAPTER_FILE)
    with pytest.raises(CheckpointIncompatibleError):
        imported(engine, tmp_path, qwen3_dir)


def test_an_adapter_on_experts_is_taken(tmp_path: Path) -> None:
    """Written by a run, since PEFT adapts stacked experts another way."""
    model_dir = save_tiny(tmp_path / "base", "qwen3_moe")
    engine = Engine.load(model_dir, max_resident_runs=4, exact=False)
    engine.create_run("source", LoraConfig(rank=2, seed=3, alpha=8.0))
    tensors, settings = engine.adapter_tensors("source")
    save_file(tensors, tmp_path / ADAPTER_FILE)
    (tmp_path / ADAPTER_CONFIG_FILE).write_text(json.dumps(settings))
    config = imported(engine, tmp_path, model_dir)
    assert (config.rank, config.alpha) == (2, 8.0)
    found, _ = engine.adapter_tensors("r")
    assert all(torch.equal(found[name], tensors[name]) for name in tensors)
