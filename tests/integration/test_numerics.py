"""Numbers through the whole service, against plain transformers, PEFT and torch.optim in float32.

Tolerance 1e-5 relative to the norm of each tensor, unless a test says otherwise: both sides compute
in float32 and differ in the order of sums over at most a few hundred terms, which measures around
1e-6. Where the same operations run on the same numbers, bits must be equal.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tests.integration.servers import BASE_MODEL, Deployment, checkpoint_folder, weight_files

import tinsmith

TOLERANCE = 1e-5
LOSSES = ("cross_entropy", "importance_sampling", "ppo")
# transformers freezes the input embedding of the padding token, which is one of these.
_NUM_SPECIAL_TOKENS = 3
ADAPTER_FILE = "adapter_model.safetensors"

# With the default eps of 1e-12 the first step of Adam is the sign of each gradient, which turns the
# rounding of a gradient near zero into a whole step. This one makes the step a smooth function.
ADAM = tinsmith.AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.99, eps=1e-1, weight_decay=0.1)
SHARP = tinsmith.AdamParams(learning_rate=2e-2)


@pytest.fixture(scope="module")
def client(embedded: Deployment) -> Iterator[tinsmith.Client]:
    with embedded.client() as client:
        yield client


@pytest.fixture(scope="module")
def vocabulary_size(client: tinsmith.Client) -> int:
    return client.list_models()[0].vocabulary_size


def make_batch(
    vocabulary_size: int,
    loss: str = "cross_entropy",
    lengths: Sequence[int] = (5, 23, 17, 31),
    seed: int = 0,
) -> list[tinsmith.Datum]:
    """Random sequences; some tokens have weight or advantage 0."""
    random = np.random.default_rng(seed)
    batch = []
    for length in lengths:
        tokens = random.integers(_NUM_SPECIAL_TOKENS, vocabulary_size, length + 1)
        coefficients = random.normal(size=length).astype(np.float32)
        coefficients[: length // 3] = 0.0
        inputs: dict[str, Any] = {"target_tokens": tokens[1:]}
        if loss == "cross_entropy":
            inputs["weights"] = coefficients
        else:
            # Near the log-probability of a uniform guess, so that ratios fall on both sides of the
            # bounds of the clip.
            recorded = random.normal(-np.log(vocabulary_size), 1.0, length)
            inputs |= {"logprobs": recorded.astype(np.float32), "advantages": coefficients}
        batch.append(tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs))
    return batch


def started_run(
    client: tinsmith.Client, batch: Sequence[tinsmith.Datum], *, rank: int = 8
) -> tuple[tinsmith.TrainingRun, tinsmith.Checkpoint]:
    """Return a run whose B is not zero, so that gradients of A are not, and its checkpoint."""
    run = client.create_lora_training_run(BASE_MODEL, rank=rank, seed=5)
    for _ in range(2):
        run.forward_backward(batch)
        run.optim_step(SHARP)
    return run, run.save_state("start").result()


def peft_model(model_dir: Path, checkpoint: tinsmith.Checkpoint, *, trainable: bool = False) -> Any:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with warnings.catch_warnings():
        # peft 0.21 reads a property that transformers 5.23 deprecates.
        warnings.simplefilter("ignore")
        return PeftModel.from_pretrained(
            base, checkpoint_folder(checkpoint), is_trainable=trainable
        ).eval()


def reference_logprobs(model: Any, datum: tinsmith.Datum) -> torch.Tensor:
    """Target log-probabilities by a plain forward of one sequence, with grad."""
    logits = model(torch.tensor(datum.model_input.to_ints())[None]).logits[0]
    targets = torch.from_numpy(datum.loss_fn_inputs["target_tokens"])[:, None]
    return torch.log_softmax(logits, -1).gather(1, targets)[:, 0]


def reference_loss(loss: str, model: Any, datum: tinsmith.Datum) -> torch.Tensor:
    """The loss formulas, written a second time for autograd."""
    logprobs = reference_logprobs(model, datum)
    inputs = {name: torch.from_numpy(value) for name, value in datum.loss_fn_inputs.items()}
    if loss == "cross_entropy":
        return -(inputs["weights"] * logprobs).sum()
    ratio = torch.exp(logprobs - inputs["logprobs"])
    if loss == "importance_sampling":
        return -(ratio * inputs["advantages"]).sum()
    clipped = torch.clamp(ratio, 0.8, 1.2)
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"]).sum()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def adapter_of(checkpoint: tinsmith.Checkpoint) -> dict[str, torch.Tensor]:
    return load_file(checkpoint_folder(checkpoint) / ADAPTER_FILE)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_step_equals_peft_and_torch_adamw(
    client: tinsmith.Client, model_dir: Path, vocabulary_size: int, loss: str
) -> None:
    run, start = started_run(client, make_batch(vocabulary_size, seed=7))
    batch = make_batch(vocabulary_size, loss)
    run.load_state(start)
    gradient = run.forward_backward(batch, loss)
    run.optim_step(ADAM)
    found = adapter_of(run.save_weights_for_sampler("stepped").result())

    model = peft_model(model_dir, start, trainable=True)
    parameters = {
        name.replace(".default", ""): parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=ADAM.learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    total = torch.stack([reference_loss(loss, model, datum) for datum in batch]).sum()
    total.backward()
    optimizer.step()

    assert gradient.result().loss == pytest.approx(total.item(), rel=TOLERANCE)
    assert found.keys() == parameters.keys()
    before = adapter_of(start)
    for name, parameter in parameters.items():
        assert relative_error(found[name], parameter.detach()) <= TOLERANCE, name
        # The step is not lost in the tolerance: it moves each tensor by far more than that.
        assert relative_error(found[name], before[name]) > 100 * TOLERANCE, name


@pytest.mark.parametrize("loss", LOSSES)
def test_two_halves_equal_the_whole_batch(
    client: tinsmith.Client, vocabulary_size: int, loss: str
) -> None:
    # Losses are sums over tokens, so gradients add up. The sums run in another order, tokens within
    # a pass against passes, hence 1e-5 and not equal bits. Halves that are sent again in the same
    # way are the same operations, hence equal bits.
    run, start = started_run(client, make_batch(vocabulary_size, seed=7))
    batch = make_batch(vocabulary_size, loss)
    found = {}
    for name, parts in {
        "whole": [batch],
        "halves": [batch[:2], batch[2:]],
        "again": [batch[:2], batch[2:]],
    }.items():
        run.load_state(start)
        for part in parts:
            run.forward_backward(part, loss)
        run.optim_step(ADAM)
        found[name] = adapter_of(run.save_weights_for_sampler(name).result())
    for name, whole in found["whole"].items():
        assert relative_error(found["halves"][name], whole) <= TOLERANCE, name
        assert torch.equal(found["halves"][name], found["again"][name])


def test_a_loaded_state_goes_on_with_equal_bits(
    client: tinsmith.Client, vocabulary_size: int
) -> None:
    batches = [make_batch(vocabulary_size, seed=seed) for seed in range(4)]

    def train(run: tinsmith.TrainingRun, batches: Sequence[list[tinsmith.Datum]]) -> list[float]:
        gradients = []
        for batch in batches:
            gradients.append(run.forward_backward(batch))
            run.optim_step(SHARP)
        return [gradient.result().loss for gradient in gradients]

    run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=5)
    train(run, batches[:2])
    half = run.save_state("half").result()
    losses = train(run, batches[2:])
    end = run.save_state("end").result()
    # Another run, of another seed, which has gone elsewhere meanwhile.
    other = client.create_lora_training_run(BASE_MODEL, rank=8, seed=6)
    train(other, batches[3:])
    assert other.load_state_with_optimizer(half).result().version == 2
    assert train(other, batches[2:]) == losses
    other_end = other.save_state("end").result()
    assert weight_files(other_end) == weight_files(end)
    assert (other_end.version, end.version) == (4, 4)


def test_greedy_sampling_is_deterministic(client: tinsmith.Client, vocabulary_size: int) -> None:
    run, _ = started_run(client, make_batch(vocabulary_size))
    sampler = run.sampler()
    prompt = [5, 6, 7, 8]
    params = tinsmith.SamplingParams(max_tokens=40, temperature=0.0, seed=1, stop=[])
    first = sampler.sample(prompt, sampling_params=params).result()
    together = [sampler.sample(prompt, sampling_params=params, num_samples=3) for _ in range(4)]
    for future in together:
        for sequence in future.result().sequences:
            assert sequence == first.sequences[0]
    assert len(first.sequences[0].tokens) == 40


def test_sampled_logprobs_equal_the_trainers_forward(
    client: tinsmith.Client, vocabulary_size: int
) -> None:
    run, _ = started_run(client, make_batch(vocabulary_size))
    sampler = run.sampler()
    prompt = [5, 6, 7, 8]
    params = tinsmith.SamplingParams(max_tokens=60, temperature=1.0, seed=1, stop=[])
    drawn = sampler.sample(prompt, sampling_params=params, num_samples=3).result()
    data = []
    for sequence in drawn.sequences:
        tokens = [*prompt, *sequence.tokens]
        inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
        data.append(tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs))
    outputs = run.forward(data).result().outputs
    for sequence, output, datum in zip(drawn.sequences, outputs, data, strict=True):
        # Sampled one token at a time over a cache, trained all at once: float32 sums of another
        # shape. 1e-5 on log-probabilities around -5 is a few units in the last place.
        np.testing.assert_allclose(
            sequence.logprobs, output.logprobs[len(prompt) - 1 :], rtol=0, atol=1e-5
        )
        # Scoring is the trainer's own forward: equal bits.
        tokens = [*datum.model_input.to_ints(), sequence.tokens[-1]]
        scores = sampler.compute_logprobs(tokens).result()
        np.testing.assert_array_equal(scores[1:], output.logprobs)


def distributions(
    sampler: tinsmith.Sampler, tokens: Sequence[int], vocabulary_size: int
) -> torch.Tensor:
    """Return the log-probability of every token after each but the last, float32 [T - 1, V]."""
    result = sampler.sample(
        tokens,
        sampling_params=tinsmith.SamplingParams(max_tokens=1),
        topk_prompt_logprobs=vocabulary_size,
    ).result()
    assert result.topk_prompt_logprobs is not None
    found = torch.full((len(tokens) - 1, vocabulary_size), torch.nan)
    assert result.topk_prompt_logprobs[0] is None
    for row, pairs in zip(found, result.topk_prompt_logprobs[1:], strict=True):
        assert pairs is not None
        row[[token for token, _ in pairs]] = torch.tensor([value for _, value in pairs])
    return found


def test_a_saved_adapter_is_the_same_model_in_peft(
    client: tinsmith.Client, model_dir: Path, vocabulary_size: int
) -> None:
    run, start = started_run(client, make_batch(vocabulary_size), rank=16)
    tokens = np.random.default_rng(3).integers(0, vocabulary_size, 40).tolist()
    model = peft_model(model_dir, start)
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor(tokens)[None]).logits[0, :-1], -1)
        with model.disable_adapter():
            base = torch.log_softmax(model(torch.tensor(tokens)[None]).logits[0, :-1], -1)
    found = distributions(run.sampler(), tokens, vocabulary_size)
    assert relative_error(found, wanted) <= TOLERANCE
    of_base = distributions(client.create_sampler(base_model=BASE_MODEL), tokens, vocabulary_size)
    assert relative_error(of_base, base) <= TOLERANCE
    # The adapter says something of its own.
    assert relative_error(wanted, base) > 100 * TOLERANCE


def test_a_full_parameter_checkpoint_is_the_same_model_in_transformers(
    client: tinsmith.Client, model_dir: Path, vocabulary_size: int, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    batch = make_batch(vocabulary_size)
    run = client.create_full_training_run(BASE_MODEL)
    for _ in range(2):
        run.forward_backward(batch)
        run.optim_step(tinsmith.AdamParams(learning_rate=1e-3))
    saved = run.save_weights_for_sampler("full").result()
    # The checkpoint holds the weights; configuration and tokenizer are the base model's.
    shutil.copytree(model_dir, tmp_path / "model")
    shutil.copy(checkpoint_folder(saved) / "model.safetensors", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)

    tokens = np.random.default_rng(3).integers(0, vocabulary_size, 40).tolist()
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor(tokens)[None]).logits[0, :-1], -1)
    live = distributions(run.sampler(), tokens, vocabulary_size)
    assert relative_error(live, wanted) <= TOLERANCE
    of_checkpoint = distributions(client.create_sampler(checkpoint=saved), tokens, vocabulary_size)
    assert torch.equal(of_checkpoint, live)
    base = client.create_sampler(base_model=BASE_MODEL)
    assert relative_error(distributions(base, tokens, vocabulary_size), wanted) > 100 * TOLERANCE


def test_a_full_parameter_step_equals_torch_adamw(
    client: tinsmith.Client, model_dir: Path, vocabulary_size: int
) -> None:
    from transformers import AutoModelForCausalLM

    batch = make_batch(vocabulary_size)
    run = client.create_full_training_run(BASE_MODEL)
    run.forward_backward(batch)
    run.optim_step(ADAM)
    saved = run.save_weights_for_sampler("stepped").result()
    found = load_file(checkpoint_folder(saved) / "model.safetensors")

    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=ADAM.learning_rate,
        betas=(ADAM.beta1, ADAM.beta2),
        eps=ADAM.eps,
        weight_decay=ADAM.weight_decay,
    )
    torch.stack([reference_loss("cross_entropy", model, datum) for datum in batch]).sum().backward()
    optimizer.step()
    assert found.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert relative_error(found[name], parameter.detach()) <= TOLERANCE, name
