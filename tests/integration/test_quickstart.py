"""The loop of the README, in one process and against separate processes: the same code and bits.

In one process live weights pass as a copy of a row; across processes they travel as sampler
checkpoints, found by their manifests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from tests.integration.servers import BASE_MODEL, Deployment, weight_files

import tinsmith
from tinsmith.names import shorten

NUM_STEPS = 8
GREEDY = tinsmith.SamplingParams(max_tokens=12, temperature=0.0, seed=0)
RANDOM = tinsmith.SamplingParams(max_tokens=12, temperature=1.0, seed=3)
ADAM = tinsmith.AdamParams(learning_rate=1e-2)


@dataclass
class Record:
    """All that the loop saw, in values that do not depend on random names."""

    losses: list[float] = field(default_factory=list)
    live: list[tinsmith.SampleResponse] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    others: dict[str, tinsmith.SampleResponse] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    answer: str = ""


def chat_datum(
    tokenizer: tinsmith.Tokenizer, question: str, answer: str
) -> tuple[list[int], tinsmith.Datum]:
    """Return the prompt of a question, and the datum that trains its answer."""
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    messages.append({"role": "assistant", "content": answer})
    tokens = tokenizer.apply_chat_template(messages)
    weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
    inputs = {"target_tokens": tokens[1:], "weights": weights}
    return list(prompt), tinsmith.Datum(tinsmith.ModelInput.from_ints(tokens[:-1]), inputs)


def quickstart(deployment: Deployment) -> Record:
    record = Record()
    with deployment.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=16, seed=1)
        tokenizer = run.get_tokenizer()
        prompt, datum = chat_datum(tokenizer, "Repeat: abc def", "abc def")
        sampler = run.sampler()

        for _ in range(NUM_STEPS):
            # Both are queued before either is awaited.
            gradient = run.forward_backward([datum], "cross_entropy")
            update = run.optim_step(ADAM)
            record.losses.append(gradient.result().loss)
            record.versions.append(update.result().version)
            record.live.append(
                sampler.sample(prompt, sampling_params=RANDOM, num_samples=2).result()
            )

        saved = run.save_state("half").result()
        weights = run.save_weights_for_sampler("weights").result()
        record.files = {"half": weight_files(saved), "weights": weight_files(weights)}
        of_checkpoint = client.create_sampler(checkpoint=weights)
        of_state = client.create_sampler(checkpoint=shorten(saved.name))
        of_base = client.create_sampler(base_model=BASE_MODEL)
        answer = sampler.sample(prompt, sampling_params=GREEDY).result()
        record.answer = tokenizer.decode(answer.sequences[0].tokens)
        record.others["live"] = answer

        # On from the checkpoint twice: with the optimizer both ways are the same.
        for name in ("once", "again"):
            run.load_state_with_optimizer(saved).result()
            record.losses.append(run.forward_backward([datum]).result().loss)
            record.versions.append(run.optim_step(ADAM).result().version)
            record.files[name] = weight_files(run.save_state(name).result())
            record.others[name] = sampler.sample(prompt, sampling_params=GREEDY).result()
        record.versions.append(run.load_state(weights).result().version)
        record.others["loaded"] = sampler.sample(prompt, sampling_params=GREEDY).result()
        record.others["checkpoint"] = of_checkpoint.sample(prompt, sampling_params=GREEDY).result()
        record.others["state"] = of_state.sample(prompt, sampling_params=GREEDY).result()
        record.others["base"] = of_base.sample(prompt, sampling_params=GREEDY).result()
    return record


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    return {}


@pytest.fixture(scope="module", params=["embedded", "processes"])
def record(request: pytest.FixtureRequest, records: dict[str, Record]) -> Record:
    records[request.param] = quickstart(request.getfixturevalue(request.param))
    return records[request.param]


def versions_of(result: tinsmith.SampleResponse) -> set[int]:
    return {version for sequence in result.sequences for version in sequence.versions}


def test_losses_fall_and_the_answer_is_learnt(record: Record) -> None:
    assert record.losses[NUM_STEPS - 1] < record.losses[0] / 5
    assert record.answer.startswith("abc def")


def test_sampled_tokens_carry_the_version_of_the_last_step_seen(record: Record) -> None:
    assert record.versions[:NUM_STEPS] == list(range(1, NUM_STEPS + 1))
    # Nothing trains meanwhile, so "not older" is "equal".
    assert [versions_of(result) for result in record.live] == [
        {version} for version in range(1, NUM_STEPS + 1)
    ]
    samples = {tuple(sequence.tokens) for result in record.live for sequence in result.sequences}
    assert len(samples) > 1


def test_samplers_of_checkpoints_and_of_the_base_model(record: Record) -> None:
    tokens = {name: result.sequences[0].tokens for name, result in record.others.items()}
    assert tokens["checkpoint"] == tokens["state"] == tokens["live"] == tokens["loaded"]
    assert tokens["base"] != tokens["live"]
    assert versions_of(record.others["checkpoint"]) == {NUM_STEPS}
    assert versions_of(record.others["state"]) == {NUM_STEPS}
    assert versions_of(record.others["base"]) == {0}
    logprobs = {name: result.sequences[0].logprobs for name, result in record.others.items()}
    assert logprobs["checkpoint"] == logprobs["live"] == logprobs["loaded"]


def test_loading_goes_on_from_the_same_bits(record: Record) -> None:
    first, second, loaded = record.versions[NUM_STEPS:]
    assert (first, second, loaded) == (NUM_STEPS + 1, NUM_STEPS + 1, 0)
    assert record.files["once"] == record.files["again"]
    assert record.files["once"] != record.files["half"]
    assert record.others["once"] == record.others["again"]
    assert versions_of(record.others["loaded"]) == {0}
    adapter = "adapter_model.safetensors"
    assert record.files["half"][adapter] == record.files["weights"][adapter]
    assert set(record.files["half"]) == {adapter, "optimizer.safetensors"}


def test_both_ways_give_equal_bits(
    records: dict[str, Record], request: pytest.FixtureRequest
) -> None:
    for way in ("embedded", "processes"):
        if way not in records:
            records[way] = quickstart(request.getfixturevalue(way))
    assert records["embedded"] == records["processes"]


@pytest.mark.parametrize("way", ["embedded", "processes"])
async def test_futures_are_awaited_in_asyncio(way: str, request: pytest.FixtureRequest) -> None:
    deployment: Deployment = request.getfixturevalue(way)
    async with await tinsmith.Client.connect_async(
        deployment.address, deployment.api_key, operation_timeout_s=60.0
    ) as client:
        run = await client.create_lora_training_run_async(BASE_MODEL, rank=8)
        tokenizer = await run.get_tokenizer_async()
        prompt, datum = chat_datum(tokenizer, "Repeat: abc def", "abc def")
        sampler = await run.sampler_async()
        updates = []
        for _ in range(3):
            run.forward_backward([datum])
            updates.append(run.optim_step(ADAM))
        # Awaited in any order; each is the result of its own place.
        assert [(await update).version for update in reversed(updates)] == [3, 2, 1]
        assert run.version == 3
        drawn = await sampler.sample(prompt, sampling_params=RANDOM)
        assert versions_of(drawn) == {3}
        fixed = await run.save_weights_and_get_sampling_client_async("third")
        run.forward_backward([datum])
        assert (await run.optim_step(ADAM).result_async(timeout=60)).version == 4
        assert await fixed.sample(prompt, sampling_params=RANDOM) == drawn
        assert versions_of(await sampler.sample(prompt, sampling_params=RANDOM)) == {4}
    with pytest.raises(tinsmith.ClientClosedError):
        run.optim_step(ADAM)


@pytest.mark.parametrize("way", ["embedded", "processes"])
def test_live_samples_follow_a_training_run(way: str, request: pytest.FixtureRequest) -> None:
    """While steps are queued, a sample is never older than the last step that was seen."""
    deployment: Deployment = request.getfixturevalue(way)
    with deployment.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=8)
        prompt, datum = chat_datum(run.get_tokenizer(), "Repeat: abc def", "abc def")
        sampler = run.sampler()
        updates = []
        for _ in range(12):
            run.forward_backward([datum])
            updates.append(run.optim_step(ADAM))
        drawn = []
        for update in updates:
            seen = update.result().version
            drawn.append((seen, sampler.sample(prompt, sampling_params=RANDOM)))
        for seen, future in drawn:
            assert min(versions_of(future.result())) >= seen
