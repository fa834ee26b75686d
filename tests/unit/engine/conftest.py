"""Tiny random models, and the reference that the engine is held to: plain transformers and PEFT."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tinsmith_engine import Datum, Engine, LoraConfig

VOCAB = 96
IMAGE_TOKEN = VOCAB - 1


def save_tiny(directory: Path, family: str, **overrides: Any) -> Path:
    """Write a random model of a family: hidden 64, 2 layers, vocabulary 96."""
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if family in ("qwen3", "qwen2", "llama", "qwen3_moe"):
        common |= {"num_key_value_heads": 2, "tie_word_embeddings": True}
    if family in ("qwen3", "qwen3_moe"):
        common["head_dim"] = 16
    if family == "qwen3_moe":
        common |= {
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        }
    torch.manual_seed(7)
    config = AutoConfig.for_model(family, **common | overrides)
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        # Norms of one and biases of zero would hide mistakes in them.
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    return directory


def save_tiny_vision(
    directory: Path, *, vocab_size: int = VOCAB, image_token: int = IMAGE_TOKEN, **text: Any
) -> Path:
    """Write a random Qwen2.5-VL: text as in `save_tiny`, a vision tower of 2 layers."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    no_tokens = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    text = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": [2, 3, 3],
        },
        **text,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    }
    torch.manual_seed(7)
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config=text | no_tokens,
        vision_config=vision,
        image_token_id=image_token,
        video_token_id=vocab_size - 2,
        vision_start_token_id=vocab_size - 4,
        vision_end_token_id=vocab_size - 3,
        tie_word_embeddings=True,
        **no_tokens,
    )
    model: Any = AutoModelForImageTextToText.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(3.0)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture
def engine(qwen3_dir: Path) -> Engine:
    return Engine.load(qwen3_dir, max_resident_runs=8)


@pytest.fixture(scope="session")
def unchanged_engine(qwen3_dir: Path) -> Engine:
    """One engine for all tests of what it refuses, and of what is read of it."""
    return Engine.load(qwen3_dir, max_resident_runs=8)


def make_batch(
    loss: str = "cross_entropy",
    lengths: Sequence[int] = (5, 23, 17, 23),
    seed: int = 0,
    *,
    num_targets: int | None = None,
) -> list[Datum]:
    """Random sequences; some tokens have weight or advantage 0.

    With `num_targets`, cross_entropy has targets and weights [T, num_targets].
    """
    random = np.random.default_rng(seed)
    batch = []
    for length in lengths:
        tokens = random.integers(0, VOCAB, length + 1)
        targets = tokens[1:]
        coefficients = random.normal(size=length).astype(np.float32)
        coefficients[: length // 3] = 0.0
        if loss == "cross_entropy":
            inputs = {"weights": coefficients}
            if num_targets is not None:
                targets = random.integers(0, VOCAB, (length, num_targets))
                shares = random.random((length, num_targets)).astype(np.float32)
                inputs = {"weights": coefficients[:, None] * shares}
        else:
            # Near log(1 / VOCAB), so that ratios fall on both sides of the clip bounds.
            inputs = {
                "logprobs": random.normal(-4.6, 0.8, length).astype(np.float32),
                "advantages": coefficients,
            }
        if loss == "stable_reinforce":
            inputs["sampled_mask"] = (coefficients != 0).astype(np.float32)
        if loss == "gspo":
            # The mean over a sequence is nearer to 1 than most bounds; some sequences are clipped.
            inputs["logprobs"] = (inputs["logprobs"] + random.normal(0.0, 0.4)).astype(np.float32)
            inputs["sequence_ratio_mask"] = (coefficients != 0).astype(np.float32)
        batch.append(Datum(tokens[:-1], targets, inputs))
    return batch


def randomise_b(engine: Engine, run: str, seed: int = 1) -> None:
    """Give an adapter a B that is not zero, so that gradients of A are not zero."""
    generator = torch.Generator().manual_seed(seed)
    tensors, _ = engine.adapter_tensors(run)
    for name, tensor in tensors.items():
        if "lora_B" in name:
            tensor.normal_(std=0.1, generator=generator)
    engine.load_adapter_tensors(run, tensors)


def peft_model(
    model_dir: Path,
    engine: Engine,
    run: str,
    adapter_dir: Path,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Load a run's exported adapter with PEFT, trainable, with all weights in `dtype`."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    tensors, config = engine.adapter_tensors(run)
    adapter_dir.mkdir(exist_ok=True)
    save_file(tensors, adapter_dir / "adapter_model.safetensors")
    (adapter_dir / "adapter_config.json").write_text(json.dumps(config))
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype)
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.23 deprecates; loading an adapter for a
        # tied unembedding warns too.
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(base, adapter_dir, is_trainable=True)
        return model.to(dtype).eval()


def reference_logprobs(
    model: Any, datum: Datum, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Target log-probabilities by a plain forward of one sequence, with grad."""
    logits = model(torch.from_numpy(datum.tokens_T)[None]).logits[0]
    log_softmax = torch.log_softmax(logits.to(dtype), -1)
    targets = torch.from_numpy(datum.targets_T)
    return log_softmax.gather(1, targets.view(len(targets), -1)).view(targets.shape)


def reference_loss(
    loss: str, logprobs: torch.Tensor, datum: Datum, config: Mapping[str, float] | None = None
) -> torch.Tensor:
    """The loss formulas, written a second time for autograd."""
    settings = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2, "beta": 0.05}
    settings |= config or {}
    inputs = {name: torch.from_numpy(v).to(logprobs.dtype) for name, v in datum.loss_inputs.items()}
    if loss == "cross_entropy":
        return -(inputs["weights"] * logprobs).sum()
    advantages, differences = inputs["advantages"], logprobs - inputs["logprobs"]
    low, high = (
        inputs.get(name, torch.tensor(settings[name], dtype=logprobs.dtype))
        for name in ("clip_low_threshold", "clip_high_threshold")
    )
    ratio = differences.exp()
    if loss == "importance_sampling":
        return -(ratio * advantages).sum()
    if loss == "cispo":
        clipped = torch.maximum(torch.minimum(ratio, high), low)
        return -(clipped.detach() * logprobs * advantages).sum()
    if loss == "dro":
        return -(logprobs * advantages - settings["beta"] / 2 * differences**2).sum()
    if loss == "stable_reinforce":
        settings = {"kl_coeff": 0.0, "max_ratio": 2.0} | (config or {})
        weights = ratio.clamp(max=settings["max_ratio"]).detach()
        pull = inputs["sampled_mask"] * settings["kl_coeff"] / 2 * differences**2
        return (pull - weights * logprobs * advantages).sum()
    if loss == "gspo":
        mask = inputs["sequence_ratio_mask"]
        sequence_ratio = torch.exp((differences * mask).sum() / mask.sum()).detach()
        ratio = sequence_ratio * torch.exp(logprobs - logprobs.detach())
    clipped = torch.maximum(torch.minimum(ratio, high), low)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-12))


def gradients(engine: Engine, run: str) -> dict[str, torch.Tensor]:
    """A run's pending gradient by public tensor name."""
    state = engine.export_state(run)
    as_weights = state.tensors | {"theta": state.tensors["grad"]}
    probe = "gradient-probe"
    state.tensors, state.has_gradient = as_weights, False
    engine.import_state(probe, state)
    tensors, _ = engine.adapter_tensors(probe)
    engine.drop_run(probe)
    return tensors


LORA = LoraConfig(rank=8, seed=3)
