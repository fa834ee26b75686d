"""Losses, gradients and steps against plain transformers, PEFT and torch.optim.

The engine computes in float32, the reference in float64. Norms, rotary angles and the softmax of
attention are float32 there too, since transformers takes them so whatever the model's dtype.
Measured over all families and losses here: the engine is at most 2.2e-6 from it, relative by
tensor, and transformers with PEFT in float32 at most 1.8e-6; so a tolerance of 3e-6.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.engine.conftest import (
    LORA,
    gradients,
    make_batch,
    peft_model,
    randomise_b,
    reference_logprobs,
    reference_loss,
    relative_error,
    save_tiny,
)

from tinsmith_engine import LOSS_SPECS, AdamParams, Datum, Engine, FullConfig, LoraConfig

TOLERANCE = 3e-6
# After a step, or where the reference is float32 as well: both sides round.
STEP_TOLERANCE = 1e-5


def total_loss(model: Any, batch: list[Datum]) -> torch.Tensor:
    losses = [reference_loss("cross_entropy", reference_logprobs(model, d), d) for d in batch]
    return torch.stack(losses).sum()


def assert_matches_peft(
    model_dir: Path,
    tmp_path: Path,
    loss: str,
    config: LoraConfig = LORA,
    *,
    num_targets: int | None = None,
) -> Engine:
    engine = Engine.load(model_dir, micro_batch_tokens=32)
    engine.create_run("run", config)
    randomise_b(engine, "run")
    batch = make_batch(loss, num_targets=num_targets)
    model = peft_model(model_dir, engine, "run", tmp_path / "adapter", torch.float64)

    wanted = [reference_logprobs(model, datum) for datum in batch]
    total = torch.stack(
        [reference_loss(loss, lp, d) for lp, d in zip(wanted, batch, strict=True)]
    ).sum()
    total.backward()  # type: ignore[no-untyped-call]
    found = engine.forward_backward("run", batch, loss, {})

    for logprobs, reference in zip(found.logprobs, wanted, strict=True):
        # Those of tokens without a loss as well.
        np.testing.assert_allclose(logprobs, reference.detach().numpy(), atol=3e-6)
    scored = engine.forward("run", batch, loss, {})
    for logprobs, reference in zip(scored.logprobs, wanted, strict=True):
        np.testing.assert_allclose(logprobs, reference.detach().numpy(), atol=3e-6)
    assert scored.metrics == pytest.approx(found.metrics, rel=1e-6)
    assert found.metrics["loss:sum"] == pytest.approx(total.item(), rel=1e-6)
    references = {
        name.replace(".default", ""): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    ours = gradients(engine, "run")
    assert ours.keys() == references.keys()
    for name, reference in references.items():
        assert relative_error(ours[name], reference) <= TOLERANCE, name
    return engine


ALL_LOSSES = [
    *(pytest.param(loss, None, id=loss) for loss in LOSS_SPECS),
    pytest.param("cross_entropy", 3, id="cross_entropy-3-targets"),
]
FALLBACK_LOSSES = [
    pytest.param("ppo", None, id="ppo"),
    pytest.param("gspo", None, id="gspo"),
    pytest.param("cross_entropy", 3, id="cross_entropy-3-targets"),
]


@pytest.mark.parametrize(("loss", "num_targets"), ALL_LOSSES)
def test_loss_and_gradient_equal_peft(
    qwen3_dir: Path, tmp_path: Path, loss: str, num_targets: int | None
) -> None:
    engine = assert_matches_peft(qwen3_dir, tmp_path, loss, num_targets=num_targets)
    assert engine.info.exactness == "exact"


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        pytest.param("qwen2", {}, id="qwen2-qkv-bias"),
        pytest.param("llama", {"tie_word_embeddings": False}, id="llama-untied"),
        pytest.param(
            "llama",
            {
                "attention_bias": True,
                "mlp_bias": True,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 500000.0,
                    "factor": 4.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                },
            },
            id="llama-biases-llama3-rope",
        ),
        pytest.param("qwen3", {"tie_word_embeddings": False}, id="qwen3-untied"),
    ],
)
def test_packed_families_equal_peft(
    tmp_path: Path, family: str, overrides: dict[str, Any], loss: str
) -> None:
    model_dir = save_tiny(tmp_path / "model", family, **overrides)
    engine = assert_matches_peft(model_dir, tmp_path, loss)
    assert engine.info.exactness == "exact"


@pytest.mark.parametrize(("loss", "num_targets"), FALLBACK_LOSSES)
@pytest.mark.parametrize("family", ["gpt_neox", "gemma2", "opt"])
def test_fallback_families_equal_peft(
    tmp_path: Path, family: str, loss: str, num_targets: int | None
) -> None:
    overrides: dict[str, Any] = {}
    if family == "opt":
        overrides = {"ffn_dim": 96, "word_embed_proj_dim": 64, "dropout": 0.0}
    if family == "gemma2":
        overrides = {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}
    model_dir = save_tiny(tmp_path / "model", family, **overrides)
    engine = assert_matches_peft(model_dir, tmp_path, loss, num_targets=num_targets)
    assert engine.info.exactness == "fallback"


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(LoraConfig(rank=3, seed=1, train_mlp=False), id="attention-only-rank-3"),
        pytest.param(LoraConfig(rank=8, seed=1, train_attention=False), id="mlp-only"),
    ],
)
def test_partial_adapters_equal_peft(qwen3_dir: Path, tmp_path: Path, config: LoraConfig) -> None:
    assert_matches_peft(qwen3_dir, tmp_path, "cross_entropy", config)


def test_unembedding_adapter_equals_peft(tmp_path: Path) -> None:
    model_dir = save_tiny(tmp_path / "model", "qwen3", tie_word_embeddings=False)
    config = LoraConfig(rank=8, seed=1, train_unembedding=True)
    assert_matches_peft(model_dir, tmp_path, "cross_entropy", config)


@pytest.mark.parametrize("family", ["qwen3", "gpt_neox"])
def test_full_parameter_step_equals_transformers(tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForCausalLM

    model_dir = save_tiny(tmp_path / "model", family)
    engine = Engine.load(model_dir)
    engine.create_run("run", FullConfig())
    batch = make_batch()
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    model.eval()
    total_loss(model, batch).backward()  # type: ignore[no-untyped-call]
    engine.forward_backward("run", batch, "cross_entropy", {})
    ours = gradients(engine, "run")
    for name, parameter in model.named_parameters():
        assert relative_error(ours[name], parameter.grad) <= STEP_TOLERANCE, name

    # With eps 1e-12 a first step is the sign of each gradient, and where a gradient is nothing but
    # rounding noise, noise decides the sign.
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
    )
    optimizer.step()
    engine.optim_step("run", AdamParams(learning_rate=1e-2, eps=1e-3, weight_decay=0.1))
    tensors, config = engine.adapter_tensors("run")
    assert config == {}
    for name, parameter in model.named_parameters():
        assert relative_error(tensors[name], parameter.detach()) <= STEP_TOLERANCE, name


def test_steps_equal_torch_adamw(qwen3_dir: Path, tmp_path: Path) -> None:
    engine = Engine.load(qwen3_dir)
    engine.create_run("run", LORA)
    randomise_b(engine, "run")
    model = peft_model(qwen3_dir, engine, "run", tmp_path / "adapter")
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3, betas=(0.9, 0.95), eps=1e-5, weight_decay=0.2)
    adam = AdamParams(learning_rate=3e-3, eps=1e-5, weight_decay=0.2, grad_clip_norm=0.5)
    for step in range(3):
        batch = make_batch(seed=step)
        optimizer.zero_grad()
        total_loss(model, batch).backward()  # type: ignore[no-untyped-call]
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        engine.forward_backward("run", batch, "cross_entropy", {})
        result = engine.optim_step("run", adam)
        assert result.version == step + 1
        assert result.metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    tensors, _ = engine.adapter_tensors("run")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            found = tensors[name.replace(".default", "")]
            assert relative_error(found, parameter.detach()) <= STEP_TOLERANCE, name


def test_exported_adapter_gives_equal_logits_in_peft(qwen3_dir: Path, tmp_path: Path) -> None:
    engine = Engine.load(qwen3_dir)
    engine.create_run("run", LORA)
    for step in range(2):
        engine.forward_backward("run", make_batch(seed=step), "cross_entropy", {})
        engine.optim_step("run", AdamParams(learning_rate=1e-2))
    model = peft_model(qwen3_dir, engine, "run", tmp_path / "adapter")
    batch = make_batch(seed=9)
    found = engine.forward("run", batch, "cross_entropy", {})
    base = engine.forward(None, batch, "cross_entropy", {})
    for logprobs, before, datum in zip(found.logprobs, base.logprobs, batch, strict=True):
        reference = reference_logprobs(model, datum).detach().numpy()
        np.testing.assert_allclose(logprobs, reference, atol=1e-5)
        assert not np.allclose(logprobs, before, atol=1e-3)


def test_bfloat16_base_stays_near_float32(qwen3_dir: Path) -> None:
    # bfloat16 has 8 bits of precision; 2 layers of it moved gradients by 2e-2 relative.
    found = {}
    for dtype in ("float32", "bfloat16"):
        engine = Engine.load(qwen3_dir, dtype=dtype)
        engine.create_run("run", LORA)
        randomise_b(engine, "run")
        engine.forward_backward("run", make_batch(), "cross_entropy", {})
        state = engine.export_state("run")
        assert state.tensors["theta"].dtype == torch.float32
        found[dtype] = state.tensors["grad"]
        engine.optim_step("run", AdamParams())
        engine.forward_backward("run", make_batch(), "cross_entropy", {})
    assert relative_error(found["bfloat16"], found["float32"]) < 0.1
