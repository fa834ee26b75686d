"""The unmodified `tinker` SDK against the services, with nothing set but URL and key."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator

import numpy as np
import pyrage
import pytest
import tinker
import torch
from safetensors.torch import load as load_safetensors
from tests.integration.servers import BASE_MODEL, Deployment
from tests.integration.tinker_users import (
    GREEDY,
    PROMPT,
    TOKENS,
    connected,
    fetch,
    key_of,
    supervised,
    train,
    url_of,
)
from tests.integration.tinker_users import (
    collected as collected,
)
from tinker import types

import tinsmith

# The SDK leaves the connections of its first call open until they are collected.
pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning", "ignore:unclosed:ResourceWarning"
)


@pytest.fixture(scope="module")
def service(embedded: Deployment) -> Iterator[tinker.ServiceClient]:
    with connected(embedded, user_metadata={"team": "a"}, display_name="a day of work") as client:
        yield client


@pytest.fixture(scope="module")
def rest(embedded: Deployment) -> tinker.RestClient:
    return tinker.RestClient(base_url=url_of(embedded), api_key=key_of(embedded))


@pytest.fixture(scope="module")
def sampler(service: tinker.ServiceClient) -> tinker.SamplingClient:
    return service.create_sampling_client(base_model=BASE_MODEL).result()


@pytest.fixture
def model(service: tinker.ServiceClient) -> tinker.TrainingClient:
    return service.create_lora_training_client(BASE_MODEL, rank=8, seed=3).result()


def test_a_model_learns_and_its_sampling_client_says_what_it_learned(
    service: tinker.ServiceClient, model: tinker.TrainingClient
) -> None:
    losses = train(model, 12)
    assert losses[-1] < 0.1 * losses[0]
    sampler = model.save_weights_and_get_sampling_client().result()
    answer = sampler.sample(PROMPT, num_samples=2, sampling_params=GREEDY).result()
    assert [sequence.tokens[:4] for sequence in answer.sequences] == [TOKENS[4:8]] * 2
    base = service.create_sampling_client(base_model=BASE_MODEL).result()
    untrained = base.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result()
    assert untrained.sequences[0].tokens[:4] != TOKENS[4:8]


def test_training_gives_the_bits_that_the_native_sdk_gives(
    embedded: Deployment, model: tinker.TrainingClient
) -> None:
    losses = train(model, 4)
    with embedded.client() as client:
        run = client.create_lora_training_run(BASE_MODEL, rank=8, seed=3, train_unembed=True)
        datum = tinsmith.Datum(
            model_input=tinsmith.ModelInput.from_ints(TOKENS[:-1]),
            loss_fn_inputs={"target_tokens": TOKENS[1:], "weights": [1.0] * 7},
        )
        native = []
        for _ in range(4):
            gradient = run.forward_backward([datum] * 2, "cross_entropy")
            run.optim_step(tinsmith.AdamParams(learning_rate=1e-2)).result()
            native.append(gradient.result().loss)
    assert losses == native


def test_the_tokenizer_of_a_model_that_is_on_no_hub_is_there(
    embedded: Deployment, model: tinker.TrainingClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    info = model.get_info()
    assert info.model_data.tokenizer_id == str(embedded.model_dir.resolve())
    tokenizer = model.get_tokenizer()
    with embedded.client() as client:
        ours = client.get_tokenizer(BASE_MODEL)
    assert tokenizer.encode("Repeat: abc") == list(ours.encode("Repeat: abc"))


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
        ("dro", {"beta": 0.1}),
        ("gspo", None),
    ],
)
def test_policy_losses_take_what_the_sampler_returned(
    model: tinker.TrainingClient, loss: str, config: dict[str, float] | None
) -> None:
    sampler = model.save_weights_and_get_sampling_client().result()
    drawn = sampler.sample(
        PROMPT, num_samples=2, sampling_params=types.SamplingParams(max_tokens=6, seed=1)
    ).result()
    data = []
    for sequence, advantage in zip(drawn.sequences, (1.0, -1.0), strict=True):
        assert sequence.logprobs is not None
        tokens = TOKENS[:4] + list(sequence.tokens)
        mask = np.array([0.0] * 3 + [1.0] * len(sequence.tokens), dtype=np.float32)
        inputs = {
            "target_tokens": np.array(tokens[1:]),
            "logprobs": np.array([0.0] * 3 + list(sequence.logprobs), dtype=np.float32),
            "advantages": mask * advantage,
        }
        if loss == "gspo":
            inputs["sequence_ratio_mask"] = mask
        data.append(
            types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)
        )
    output = model.forward_backward(data, loss, config).result()
    # The sampler's log-probabilities are those of the trainer, up to the rounding of a decode.
    assert output.metrics["ratio:mean"] == pytest.approx(1.0, abs=1e-5)
    assert [one["logprobs"].shape for one in output.loss_fn_outputs] == [
        [datum.model_input.length] for datum in data
    ]
    model.optim_step(types.AdamParams(learning_rate=1e-3)).result()


def test_a_loss_over_several_targets_takes_sparse_tensors(model: tinker.TrainingClient) -> None:
    targets = torch.zeros(7, 4, dtype=torch.int64)
    weights = torch.zeros(7, 4)
    targets[:, 0], weights[:, 0] = torch.tensor(TOKENS[1:]), 1.0
    inputs = types.ModelInput.from_ints(TOKENS[:-1])
    sparse = types.Datum(
        model_input=inputs, loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    wide = model.forward([sparse], "cross_entropy").result()
    plain = model.forward([supervised(TOKENS)], "cross_entropy").result()
    assert wide.loss_fn_outputs[0]["logprobs"].shape == [7, 4]
    assert wide.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-6)


def test_a_large_batch_goes_in_chunks_and_gives_the_gradient_of_the_whole(
    service: tinker.ServiceClient,
) -> None:
    # 1,024 datums go in one chunk; these are two, and the second is sent first.
    batch = [supervised(TOKENS, weight=1e-3)] * 1100
    chunked = service.create_lora_training_client(BASE_MODEL, rank=8, seed=5).result()
    output = chunked.forward_backward(batch, "cross_entropy").result()
    step = chunked.optim_step(types.AdamParams()).result()
    assert len(output.loss_fn_outputs) == 1100
    single = service.create_lora_training_client(BASE_MODEL, rank=8, seed=5).result()
    once = single.forward_backward([supervised(TOKENS, weight=1.1)], "cross_entropy").result()
    assert output.metrics["loss:sum"] == pytest.approx(once.metrics["loss:sum"], rel=1e-4)
    alone = single.optim_step(types.AdamParams()).result()
    assert step.metrics is not None
    assert alone.metrics is not None
    assert step.metrics["grad_norm"] == pytest.approx(alone.metrics["grad_norm"], rel=1e-4)


def test_a_client_side_loss_gives_the_gradient_of_the_built_in_one(
    service: tinker.ServiceClient,
) -> None:
    def negative_likelihood(
        data: list[types.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        loss = -sum((one.sum() for one in logprobs), torch.zeros(()))
        return loss, {"seen:sum": float(len(data))}

    norms = []
    for is_custom in (True, False):
        model = service.create_lora_training_client(BASE_MODEL, rank=8, seed=7).result()
        data = [supervised(TOKENS)] * 2
        if is_custom:
            gradient = model.forward_backward_custom(data, negative_likelihood)
        else:
            gradient = model.forward_backward(data, "cross_entropy")
        # Sent while the custom loss is computed: its number is behind two that are not sent yet.
        update = model.optim_step(types.AdamParams())
        assert gradient.result().metrics["loss:sum"] > 0
        metrics = update.result().metrics
        assert metrics is not None
        norms.append(metrics["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_a_traced_loss_runs_in_the_client(service: tinker.ServiceClient) -> None:
    def weighted(
        logprobs: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = -(logprobs * weights).sum()
        return loss, {"custom/most:mean": -logprobs.min()}

    handle = service.create_custom_loss(weighted, {"logprobs": 1, "weights": 1}).result()
    assert handle.loss_id is None
    data = [supervised(TOKENS), supervised(TOKENS[::-1], weight=0.5)]
    found = []
    for loss in (handle, None):
        model = service.create_lora_training_client(BASE_MODEL, rank=8, seed=9).result()
        gradient = (
            model.forward_backward(data, "cross_entropy")
            if loss is None
            else model.forward_backward_custom(data, loss)
        )
        update = model.optim_step(types.AdamParams()).result()
        assert update.metrics is not None
        found.append((gradient.result().metrics, update.metrics["grad_norm"]))
    (custom, custom_norm), (built_in, norm) = found
    assert custom["loss:sum"] == pytest.approx(built_in["loss:sum"], rel=1e-6)
    assert custom_norm == pytest.approx(norm, rel=1e-6)
    assert custom["custom/most:mean"] > 0


class TestMistakes:
    """A user's mistake is a failed future, and the next call goes on."""

    def test_a_refused_batch_fails_its_future_and_the_step_behind_it(
        self, model: tinker.TrainingClient
    ) -> None:
        right = model.forward_backward([supervised(TOKENS)], "cross_entropy")
        wrong = model.forward_backward([supervised([5, 6, 10**8])], "cross_entropy")
        update = model.optim_step(types.AdamParams())
        with pytest.raises(tinker.RequestFailedError, match="TOKEN_OUT_OF_VOCABULARY") as failure:
            wrong.result()
        assert failure.value.category == types.RequestErrorCategory.User
        assert right.result().metrics["loss:sum"] > 0
        # Half of the batch is missing, and the other half was sent before that could be known.
        with pytest.raises(tinker.RequestFailedError, match="GRADIENT_INCOMPLETE"):
            update.result()
        train(model, 1)

    def test_a_program_that_catches_the_error_goes_on_with_the_next_batch(
        self, model: tinker.TrainingClient
    ) -> None:
        with pytest.raises(tinker.RequestFailedError, match="TOKEN_OUT_OF_VOCABULARY"):
            model.forward_backward([supervised([5, 6, 10**8])], "cross_entropy").result()
        train(model, 1)

    def test_another_optimizer_is_refused_and_the_next_step_works(
        self, model: tinker.TrainingClient
    ) -> None:
        model.forward_backward([supervised(TOKENS)], "cross_entropy").result()
        refused = model.optim_step(types.DimuonParams(learning_rate=1e-3))
        with pytest.raises(tinker.RequestFailedError, match="dimuon"):
            refused.result()
        train(model, 1)

    def test_a_name_that_can_not_be_one_uses_up_its_number_only(
        self, model: tinker.TrainingClient
    ) -> None:
        with pytest.raises(tinker.RequestFailedError, match="path must be"):
            model.save_state("a/b").result()
        train(model, 1)

    def test_an_unknown_model_and_path_are_not_found(self, service: tinker.ServiceClient) -> None:
        with pytest.raises(tinker.NotFoundError, match="gpt-9"):
            service.create_lora_training_client("gpt-9").result()
        with pytest.raises(tinker.NotFoundError, match="does not exist"):
            service.create_training_client_from_state("tinker://nobody/weights/x").result()

    def test_a_prompt_that_is_too_long_fails_its_sample(
        self, service: tinker.ServiceClient
    ) -> None:
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
        with pytest.raises(tinker.RequestFailedError, match="SEQUENCE_TOO_LONG"):
            sampler.sample(
                types.ModelInput.from_ints([5] * 5000), num_samples=1, sampling_params=GREEDY
            ).result()


class TestCheckpoints:
    """Saves of all kinds, and what can be done with them."""

    def test_a_model_goes_on_from_a_state_to_the_bit(
        self, service: tinker.ServiceClient, model: tinker.TrainingClient
    ) -> None:
        train(model, 3)
        saved = model.save_state("third").result()
        path = saved.path
        ahead = train(model, 2)
        resumed = service.create_training_client_from_state_with_optimizer(path).result()
        assert train(resumed, 2) == ahead
        restarted = service.create_training_client_from_state(path).result()
        assert train(restarted, 2)[0] == ahead[0]

    def test_a_state_is_loaded_into_a_model_that_trains(self, model: tinker.TrainingClient) -> None:
        train(model, 2)
        saved = model.save_state("second").result()
        ahead = train(model, 2)
        with pytest.warns(FutureWarning):
            loading = model.load_state_with_optimizer(saved.path)
        loading.result()
        assert train(model, 2) == ahead

    def test_a_name_is_taken_unless_it_may_be_overwritten(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 1)
        first = model.save_state("latest").result()
        with pytest.raises(tinker.RequestFailedError, match="exists"):
            model.save_state("latest").result()
        train(model, 1)
        second = model.save_state("latest", overwrite=True).result()
        assert second.path == first.path
        with pytest.raises(tinker.RequestFailedError, match="exists"):
            model.save_state("latest").result()
        listed = rest.list_checkpoints(model.model_id).result().checkpoints
        assert [one.checkpoint_id for one in listed] == ["weights/latest"]

    def test_a_state_and_sampler_weights_may_share_a_name(
        self, service: tinker.ServiceClient, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 12)
        model.save_state("final", ttl_seconds=7200, user_metadata={"step": "12"}).result()
        weights = model.save_weights_for_sampler("final").result()
        sampler = service.create_sampling_client(model_path=weights.path).result()
        answer = sampler.sample(PROMPT, num_samples=1, sampling_params=GREEDY).result()
        assert answer.sequences[0].tokens[:4] == TOKENS[4:8]
        listed = rest.list_checkpoints(model.model_id).result().checkpoints
        kinds = {one.checkpoint_id: one.checkpoint_type for one in listed}
        assert kinds == {"weights/final": "training", "sampler_weights/final": "sampler"}
        (state,) = (one for one in listed if one.checkpoint_type == "training")
        assert state.user_metadata == {"step": "12"}
        assert state.expires_at is not None

    def test_a_frozen_sampling_client_does_not_follow_and_an_inflight_one_does(
        self, model: tinker.TrainingClient
    ) -> None:
        frozen = model.save_weights_and_get_sampling_client().result()
        live = model.save_weights_and_get_sampling_client(kind="inflight").result()
        before = frozen.compute_logprobs(PROMPT).result()
        assert live.compute_logprobs(PROMPT).result() == before
        train(model, 3)
        model.save_weights_and_get_sampling_client(kind="inflight").result()
        assert frozen.compute_logprobs(PROMPT).result() == before
        assert live.compute_logprobs(PROMPT).result() != before

    def test_weights_are_published_limited_copied_and_deleted(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 1)
        path = model.save_state("shared").result().path
        rest.publish_checkpoint_from_tinker_path(path).result()
        rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
        (shared,) = rest.list_checkpoints(model.model_id).result().checkpoints
        assert shared.public
        assert shared.expires_at is not None
        rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
        rest.unpublish_checkpoint_from_tinker_path(path).result()
        (private,) = rest.list_checkpoints(model.model_id).result().checkpoints
        assert not private.public
        assert private.expires_at is None
        info = rest.get_weights_info_by_tinker_path(path).result()
        assert (info.base_model, info.is_lora, info.lora_rank) == (BASE_MODEL, True, 8)
        copied = rest.copy_weights(path, "default").result()
        rest.delete_checkpoint_from_tinker_path(path).result()
        assert rest.list_checkpoints(model.model_id).result().checkpoints == []
        assert rest.get_weights_info_by_tinker_path(copied).result().lora_rank == 8

    def test_external_weights_are_what_peft_reads(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        train(model, 1)
        saved = model.save_weights_external("export").result()
        links = rest.get_external_weights_urls(saved.path).result()
        files = {name: fetch(url) for name, url in links.urls.items()}
        assert set(files) == {"adapter_config.json", "adapter_model.safetensors"}
        assert json.loads(files["adapter_config.json"])["r"] == 8
        assert all("lora_" in name for name in load_safetensors(files["adapter_model.safetensors"]))
        assert links.expires > datetime.datetime.now(tz=datetime.UTC)

    def test_external_weights_are_encrypted_for_whom_they_are(
        self, model: tinker.TrainingClient, rest: tinker.RestClient
    ) -> None:
        identity = pyrage.x25519.Identity.generate()
        train(model, 1)
        saved = model.save_weights_external(
            "secret", age_encryption_recipients=[str(identity.to_public())]
        ).result()
        links = rest.get_external_weights_urls(saved.path).result()
        sealed = fetch(links.urls["adapter_config.json.age"])
        assert json.loads(pyrage.decrypt(sealed, [identity]))["r"] == 8
        assert b"adapter" not in sealed
