"""Mixtures of experts: gradients against autograd, neighbours, sampling, and the router at rest.

The reference is the transformers module with `W + alpha / rank * B A` in place of each weight, and
autograd through it, in float64. Tolerance 3e-6 relative by tensor: ours measures up to 1.9e-6 and
the module's own autograd in float32 2.1e-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
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

from tinsmith_engine import (
    AdamParams,
    AdapterConfig,
    BatchResult,
    Datum,
    Engine,
    FullConfig,
    LoraConfig,
    Sampler,
    SampleRequest,
)
from tinsmith_engine.base.types import BatchRequest
from tinsmith_runtime.errors import InvalidFieldError

TOLERANCE = 3e-6
MIXED = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
"""Layer 1 has experts; 0, 2 and 3 are dense."""


@pytest.fixture(scope="session")
def moe_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("moe"), "qwen3_moe")


def load_reference(model_dir: Path, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=dtype, experts_implementation="eager"
    )
    return model.eval()


def adapted_parameters(
    model: Any, leaves: Mapping[str, torch.Tensor], scale: float
) -> dict[str, torch.Tensor]:
    """The module's parameters with each adapter's product added, experts' ones included."""

    def delta(module: str) -> torch.Tensor | float:
        a = leaves.get(f"base_model.model.{module}.lora_A.weight")
        b = leaves.get(f"base_model.model.{module}.lora_B.weight")
        return 0.0 if a is None or b is None else scale * b @ a

    found = {}
    for name, parameter in model.named_parameters():
        parameter = parameter.detach()
        if ".experts." in name:
            prefix, kind = name.rsplit(".", 1)
            projections = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
            found[name] = torch.stack(
                [
                    torch.cat(
                        [
                            part + delta(f"{prefix}.{expert}.{projection}")
                            for part, projection in zip(
                                weight.chunk(len(projections)), projections, strict=True
                            )
                        ]
                    )
                    for expert, weight in enumerate(parameter)
                ]
            )
        else:
            found[name] = parameter + delta(name.removesuffix(".weight"))
    return found


def reference_gradients(
    model_dir: Path, engine: Engine, run: str, batch: list[Datum], dtype: torch.dtype
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model = load_reference(model_dir, dtype)
    tensors, config = engine.adapter_tensors(run)
    leaves = {name: tensor.to(dtype).requires_grad_() for name, tensor in tensors.items()}
    parameters = adapted_parameters(model, leaves, config["lora_alpha"] / config["r"])

    def call(tokens: torch.Tensor) -> Any:
        return torch.func.functional_call(model, parameters, (tokens,), tie_weights=True)

    logprobs = [reference_logprobs(call, datum, dtype) for datum in batch]
    losses = [
        reference_loss("cross_entropy", found, datum)
        for found, datum in zip(logprobs, batch, strict=True)
    ]
    grads = torch.autograd.grad(torch.stack(losses).sum(), list(leaves.values()))
    return logprobs, dict(zip(leaves, grads, strict=True))


def request(run: str, seed: int, lengths: tuple[int, ...] = (5, 23, 17, 23)) -> BatchRequest:
    return BatchRequest(
        run=run,
        batch=make_batch(seed=seed, lengths=lengths),
        loss="cross_entropy",
        loss_config={},
        is_backward=True,
    )


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({}, id="all-experts"),
        pytest.param({"norm_topk_prob": False, "tie_word_embeddings": False}, id="not-normalised"),
        pytest.param(MIXED, id="mixed"),
    ],
)
def test_logprobs_and_gradients_equal_autograd(tmp_path: Path, overrides: dict[str, Any]) -> None:
    model_dir = save_tiny(tmp_path, "qwen3_moe", **overrides)
    engine = Engine.load(model_dir, micro_batch_tokens=32)
    assert engine.info.exactness == "exact"
    engine.create_run("run", LORA)
    randomise_b(engine, "run")
    batch = make_batch()
    logprobs, wanted = reference_gradients(model_dir, engine, "run", batch, torch.float64)
    engine.forward_backward("run", batch, "cross_entropy", {})
    ours = gradients(engine, "run")
    assert ours.keys() == wanted.keys()
    for name, reference in wanted.items():
        assert relative_error(ours[name], reference) <= TOLERANCE, name
    scored = engine.forward("run", batch, "cross_entropy", {})
    for found, reference in zip(scored.logprobs, logprobs, strict=True):
        assert relative_error(torch.from_numpy(found), reference.detach()) <= TOLERANCE


def merged(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the tensor of the transformers module that a run holds by expert."""
    if not name.endswith((".gate_up_proj", ".down_proj")):
        return tensors[name]
    prefix, kind = name.rsplit(".", 1)
    projections = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else ["down_proj"]
    experts = len([one for one in tensors if one.startswith(f"{prefix}.") and "down_proj" in one])
    return torch.stack(
        [
            torch.cat([tensors[f"{prefix}.{expert}.{one}.weight"] for one in projections])
            for expert in range(experts)
        ]
    )


@pytest.mark.parametrize(
    "overrides", [pytest.param({}, id="all-experts"), pytest.param(MIXED, id="mixed")]
)
def test_full_parameter_step_equals_transformers(tmp_path: Path, overrides: dict[str, Any]) -> None:
    model_dir = save_tiny(tmp_path, "qwen3_moe", **overrides)
    engine = Engine.load(model_dir)
    engine.create_run("run", FullConfig())
    batch = make_batch()
    model = load_reference(model_dir)
    losses = [reference_loss("cross_entropy", reference_logprobs(model, d), d) for d in batch]
    torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]
    engine.forward_backward("run", batch, "cross_entropy", {})
    ours = gradients(engine, "run")
    parameters = dict(model.named_parameters())
    assert "model.layers.1.mlp.gate.weight" in parameters
    for name, parameter in parameters.items():
        assert relative_error(merged(ours, name), parameter.grad) <= 1e-5, name

    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, betas=(0.9, 0.95), eps=1e-3, weight_decay=0.1
    )
    optimizer.step()
    engine.optim_step("run", AdamParams(learning_rate=1e-2, eps=1e-3, weight_decay=0.1))
    tensors, _ = engine.adapter_tensors("run")
    for name, parameter in parameters.items():
        assert relative_error(merged(tensors, name), parameter.detach()) <= 1e-5, name


def test_fused_checkpoints_are_read_as_well(moe_dir: Path, tmp_path: Path) -> None:
    load_reference(moe_dir).save_pretrained(tmp_path, save_original_format=False)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as weights:
        assert "model.layers.0.mlp.experts.gate_up_proj" in weights.keys()  # noqa: SIM118
    rows = [Engine.load(place).model.initial_parameters() for place in (moe_dir, tmp_path)]
    assert torch.equal(*rows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mixed_pass_gives_the_bits_of_each_alone(tmp_path: Path, dtype: str) -> None:
    model_dir = save_tiny(tmp_path, "qwen3_moe", **MIXED, vocab_size=96)
    engine = Engine.load(model_dir, dtype=dtype)
    configs: dict[str, AdapterConfig] = {
        "a": LoraConfig(rank=8, seed=1),
        "b": LoraConfig(rank=8, seed=2),
        "c": LoraConfig(rank=4, seed=3),
        "d": LoraConfig(rank=8, seed=4, train_mlp=False),
        "e": LoraConfig(rank=8, seed=5, alpha=16.0, train_attention=False),
        "full": FullConfig(),
    }
    for index, (run, config) in enumerate(configs.items()):
        engine.create_run(run, config)
        if isinstance(config, LoraConfig):
            randomise_b(engine, run, seed=index)
    lengths = [(5, 23, 17, 23), (9, 23, 13, 23), (70, 3), (1,), (33, 24), (7, 11)]
    requests = [request(run, seed, lengths[seed]) for seed, run in enumerate(configs)]
    # Twice: the second gradient is added to the first.
    alone = [outcome(engine, [one, one])[0] for one in requests]
    mixed = outcome(engine, [*requests, *requests])
    backwards = outcome(engine, [*requests[::-1], *requests[::-1]])[::-1]
    for run, wanted, found, other in zip(configs, alone, mixed, backwards, strict=True):
        assert wanted == found, run
        assert wanted == other, run


def outcome(engine: Engine, requests: list[BatchRequest]) -> list[bytes]:
    """Return the bits of each run's last log-probabilities and of its gradient."""
    bits = {}
    for one, result in zip(requests, engine.compute(requests), strict=True):
        assert isinstance(result, BatchResult)
        bits[str(one.run)] = b"".join(logprobs.tobytes() for logprobs in result.logprobs)
    for run in bits:
        bits[run] += engine.export_state(run).tensors["grad"].numpy().tobytes()
        engine.clear_gradient(run)
    return list(bits.values())


def test_checkpointing_changes_no_bit(moe_dir: Path) -> None:
    found = []
    for checkpoint_activations_over_tokens in (16_384, 8):
        engine = Engine.load(
            moe_dir, checkpoint_activations_over_tokens=checkpoint_activations_over_tokens
        )
        engine.create_run("run", LORA)
        randomise_b(engine, "run")
        found.append(outcome(engine, [request("run", 0)]))
    assert found[0] == found[1]


def test_the_router_and_the_base_stay_as_they_are(moe_dir: Path) -> None:
    engine = Engine.load(moe_dir)
    engine.create_run("run", LoraConfig(rank=8, seed=1, train_unembedding=True))
    before = engine.model.initial_parameters().clone()
    tensors, config = engine.adapter_tensors("run")
    routers = {f"model.layers.{layer}.mlp.gate" for layer in range(2)}
    assert not any(".mlp.gate." in name or "router" in name for name in tensors)
    assert not routers & set(config["target_modules"])
    assert "gate" not in config["target_modules"]
    assert any(".mlp.experts.7.down_proj.lora_A" in name for name in tensors)
    for seed in range(2):
        engine.forward_backward("run", make_batch(seed=seed), "cross_entropy", {})
        engine.optim_step("run", AdamParams(learning_rate=1e-2))
    assert torch.equal(engine.model.initial_parameters(), before)


def test_an_expert_without_tokens_has_no_gradient(moe_dir: Path) -> None:
    engine = Engine.load(moe_dir)
    engine.create_run("run", LORA)
    randomise_b(engine, "run")
    # What the row held must not show through.
    engine.forward_backward("run", make_batch(), "cross_entropy", {})
    engine.clear_gradient("run")
    engine.forward_backward("run", make_batch(lengths=(2,)), "cross_entropy", {})
    ours = gradients(engine, "run")
    norms = [
        float(
            ours[f"base_model.model.model.layers.0.mlp.experts.{e}.down_proj.lora_A.weight"].norm()
        )
        for e in range(8)
    ]
    assert 1 <= sum(norm > 0 for norm in norms) <= 4


def test_exported_adapters_give_equal_logits_in_peft(moe_dir: Path, tmp_path: Path) -> None:
    engine = Engine.load(moe_dir)
    engine.create_run("run", LORA)
    for step in range(2):
        engine.forward_backward("run", make_batch(seed=step), "cross_entropy", {})
        engine.optim_step("run", AdamParams(learning_rate=1e-2))
    model = peft_model(moe_dir, engine, "run", tmp_path / "adapter")
    batch = make_batch(seed=9)
    found = engine.forward("run", batch, "cross_entropy", {})
    base = engine.forward(None, batch, "cross_entropy", {})
    for logprobs, before, datum in zip(found.logprobs, base.logprobs, batch, strict=True):
        reference = reference_logprobs(model, datum).detach().numpy()
        np.testing.assert_allclose(logprobs, reference, atol=1e-5)
        assert not np.allclose(logprobs, before, atol=1e-3)


def sample(engine: Engine, *requests: SampleRequest) -> list[list[Any]]:
    sampler = Sampler(engine, max_sequences=40)
    ids = [sampler.add(one) for one in requests]
    finished = []
    while sampler.has_work:
        finished += sampler.step()
    finished.sort(key=lambda one: (one.request_id, one.sample_index))
    return [
        [(one.tokens, one.logprobs.tobytes()) for one in finished if one.request_id == request_id]
        for request_id in ids
    ]


def test_greedy_samples_equal_hugging_face(moe_dir: Path) -> None:
    prompt = [3, 1, 4, 15, 9, 2, 6]
    model = load_reference(moe_dir)
    wanted = model.generate(
        torch.tensor([prompt]), do_sample=False, max_new_tokens=20, pad_token_id=0
    )[0, len(prompt) :].tolist()
    (found,) = sample(
        Engine.load(moe_dir), SampleRequest(prompt_tokens=prompt, max_tokens=20, temperature=0.0)
    )
    assert found[0][0] == wanted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_samples_do_not_depend_on_neighbours_and_score_as_in_training(
    moe_dir: Path, dtype: str
) -> None:
    engine = Engine.load(moe_dir, dtype=dtype)
    runs: dict[str, AdapterConfig] = {
        "a": LORA,
        "b": LoraConfig(rank=4, seed=9),
        "full": FullConfig(),
    }
    requests = []
    for index, (run, config) in enumerate(runs.items()):
        engine.create_run(run, config)
        if isinstance(config, LoraConfig):
            randomise_b(engine, run, seed=index)
        weights = engine.export(run)
        for length in (3, 11):
            requests.append(
                SampleRequest(
                    prompt_tokens=list(range(index, index + length)),
                    max_tokens=9,
                    seed=length,
                    num_samples=3,
                    weights=weights,
                )
            )
    alone = [sample(engine, one)[0] for one in requests]
    assert sample(engine, *requests) == alone
    tokens = alone[0][0][0]
    prompt = list(requests[0].prompt_tokens)
    whole = np.array(prompt + tokens)
    datum = Datum(whole[:-1], whole[1:], {"weights": np.ones(len(whole) - 1, np.float32)})
    scored = engine.forward("a", [datum], "cross_entropy", {}).logprobs[0][len(prompt) - 1 :]
    logprobs = np.frombuffer(alone[0][0][1], dtype=np.float32)
    np.testing.assert_allclose(logprobs, scored, atol=1e-5 if dtype == "float32" else 0.1)


def test_metrics_say_how_many_experts_saw_a_token(moe_dir: Path) -> None:
    engine = Engine.load(moe_dir, micro_batch_tokens=8)
    engine.create_run("run", LORA)
    one = engine.forward("run", make_batch(lengths=(1,)), "cross_entropy", {})
    # One token, 2 of 8 experts.
    assert one.metrics["e_frac_with_tokens:mean"] == 0.25
    requests = [request("run", 0, (1,)), request("run", 0, (60, 60, 60))]
    few, many = engine.compute(requests)
    assert isinstance(few, BatchResult)
    assert isinstance(many, BatchResult)
    assert few.metrics["e_frac_with_tokens:mean"] == 0.25
    assert many.metrics["e_frac_with_tokens:mean"] > 0.5


def test_no_router_is_adapted_in_the_fallback(tmp_path: Path) -> None:
    model_dir = save_tiny(
        tmp_path,
        "qwen2_moe",
        num_key_value_heads=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=1,
    )
    engine = Engine.load(model_dir)
    assert engine.info.exactness == "fallback"
    engine.create_run("run", LORA)
    names = {name.split(".lora_")[0] for name in engine.adapter_tensors("run")[0]}
    assert any(name.endswith("shared_expert.gate_proj") for name in names)
    assert not any(name.endswith(("mlp.gate", "shared_expert_gate")) for name in names)
    engine.forward_backward("run", make_batch(), "cross_entropy", {})


def test_many_runs_in_bfloat16_keep_their_bits(moe_dir: Path) -> None:
    # A batched product of one matrix rounds some numbers otherwise than that of several: with
    # these runs, one gradient of an expert that no neighbour used did.
    engine = Engine.load(moe_dir, dtype="bfloat16")
    random = np.random.default_rng(0)
    requests = []
    for index in range(20):
        rank = int(random.choice([4, 8])) if index < 12 else 8
        lengths = (40, 24)
        if index < 12:
            lengths = tuple(random.integers(1, 90, random.integers(1, 5)).tolist())
        engine.create_run(f"run-{index}", LoraConfig(rank=rank, seed=index))
        randomise_b(engine, f"run-{index}", seed=index)
        requests.append(request(f"run-{index}", index, lengths))
    alone = [outcome(engine, [one])[0] for one in requests]
    assert outcome(engine, requests) == alone


FUSED = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "olmoe": {"num_experts": 4, "num_key_value_heads": 2},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
"""Families that run through transformers, which keeps the experts of a layer in one tensor."""


@pytest.mark.parametrize("family", FUSED)
def test_an_adapter_that_would_leave_out_experts_is_refused(family: str, tmp_path: Path) -> None:
    engine = Engine.load(save_tiny(tmp_path, family, **FUSED[family]), max_resident_runs=2)
    with pytest.raises(InvalidFieldError, match=r"train_mlp.*layers\.\d\.mlp\.experts") as refused:
        engine.check_new_run(LoraConfig(rank=4, seed=0))
    assert "attention alone, or all weights" in refused.value.message
    engine.check_new_run(LoraConfig(rank=4, seed=0, train_mlp=False))
    engine.check_new_run(FullConfig())


def test_experts_of_the_packed_decoder_take_adapters(moe_dir: Path) -> None:
    Engine.load(moe_dir, max_resident_runs=2).check_new_run(LoraConfig(rank=4, seed=0))
